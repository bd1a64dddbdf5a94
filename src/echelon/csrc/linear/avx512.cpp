// Linear layers with AVX-512: float32 arithmetic; bfloat16 widens by a shift, float16 by conversion.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

namespace echelon::linear {
namespace {

struct Vector {
  using Register = __m512;
  static constexpr const char* name = "avx512";
  static constexpr int width = 16, most_rows = 13, most_sums = 26, short_block = 0;

  static Register load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Register v) { _mm512_storeu_ps(p, v); }
  static Register broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Register fma(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }
  typedef uint32_t Bits __attribute__((vector_size(64), aligned(2), may_alias));
  static Register even(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) << 16); }
  static Register odd(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) & 0xffff0000u); }
  static Register f16(const uint16_t* p) { return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
};

}  // namespace
}  // namespace echelon::linear

#include "fma.h"
#include "integers.h"
#include "lanes512.h"

namespace echelon::linear {

const Family& avx512_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear

namespace echelon::linear {
namespace {

// Products of pairs of int16: four entries of x are two pairs, and so are the even and odd bytes of the weight.
struct Pairs : Lanes512 {
  static constexpr const char* name = "avx512";
  static constexpr int most_rows = 10, entry_bytes = 8, few_rows = 2;
  static constexpr bool narrow = false;
  static constexpr int at_once(int) { return 2; }
  struct Quads {
    Register even, odd;
  };
  using Entry = Quads;

  static Quads quads(Register v) { return {_mm512_and_si512(v, _mm512_set1_epi16(255)), _mm512_srli_epi16(v, 8)}; }
  static Entry entry(const char* x) { return {all(word(x)), all(word(x + 4))}; }
  static Register dot(Register sum, Quads w, Entry x) {
    return _mm512_add_epi32(_mm512_add_epi32(sum, _mm512_madd_epi16(w.even, x.even)), _mm512_madd_epi16(w.odd, x.odd));
  }
};

// Products of bytes, summed in int16: exact for a weight below 16, eight times 2 · 15 · 127.
struct Bytes : Lanes512 {
  static constexpr const char* name = "avx512";
  static constexpr int most_rows = 12, entry_bytes = 4, few_rows = 2;
  static constexpr bool narrow = true;
  static constexpr int at_once(int rows) { return rows <= 4 ? 2 : 1; }

  static Register entry(const char* x) { return all(word(x)); }
  static Register narrow_dot(Register sum, Register w, Register x) {
    sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
    asm("" : "+v"(sum));  // added now: put off, the products of a whole group would leave their registers
    return sum;
  }
  static Register widen(Register sum, Register part) { return _mm512_add_epi32(sum, _mm512_madd_epi16(part, _mm512_set1_epi16(1))); }
};

}  // namespace

const Family& avx512_integers(int bits) { return bits == 8 ? IntegerFamily<Pairs, 8>::family : IntegerFamily<Bytes, 4>::family; }

}  // namespace echelon::linear

#pragma GCC pop_options
