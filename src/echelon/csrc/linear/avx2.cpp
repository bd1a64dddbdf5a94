// Linear layers with AVX2, FMA and F16C.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace echelon::linear {
namespace {

struct Vector {
  using Register = __m256;
  static constexpr const char* name = "avx2";
  static constexpr int width = 8, most_rows = 6, most_sums = 12, short_block = 2;

  static Register load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Register v) { _mm256_storeu_ps(p, v); }
  static Register broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Register fma(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256i bits(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Register even(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits(p), 16)); }
  // The mask stays in memory: with it in a register, sums of three rows would leave theirs.
  static Register odd(const uint16_t* p) {
    alignas(32) static const uint32_t upper[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
    __m256i out;
    asm("vpand %2, %1, %0" : "=x"(out) : "x"(bits(p)), "m"(*reinterpret_cast<const __m256i*>(upper)));
    return _mm256_castsi256_ps(out);
  }
  static Register f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

}  // namespace
}  // namespace echelon::linear

#include "fma.h"
#include "integers.h"
#include "lanes256.h"

namespace echelon::linear {

const Family& avx2_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear

namespace echelon::linear {
namespace {

// Products of pairs of int16: four entries of x are two pairs, and so are the even and odd bytes of the weight.
struct Pairs : Lanes256 {
  static constexpr const char* name = "avx2";
  static constexpr int most_rows = 4, entry_bytes = 8, few_rows = 1;
  static constexpr bool narrow = false;
  static constexpr int at_once(int rows) { return rows <= 2 ? 4 : 2; }
  struct Quads {
    Register even, odd;
  };
  using Entry = Quads;

  static Quads quads(Register v) { return {_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16(v, 8)}; }
  static Entry entry(const char* x) { return {all(word(x)), all(word(x + 4))}; }
  static Register dot(Register sum, Quads w, Entry x) {
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_madd_epi16(w.even, x.even)), _mm256_madd_epi16(w.odd, x.odd));
  }
};

// Products of bytes, summed in int16: exact for a weight below 16, eight times 2 · 15 · 127. Float32 sums and those of a group may leave their
// registers, since only the narrow ones are needed at every step.
struct Bytes : Lanes256 {
  static constexpr const char* name = "avx2";
  static constexpr int most_rows = 4, entry_bytes = 4, few_rows = 0;
  static constexpr bool narrow = true;
  static constexpr int at_once(int rows) { return rows <= 3 ? 4 : 2; }

  static Register entry(const char* x) { return all(word(x)); }
  static Register narrow_dot(Register sum, Register w, Register x) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    asm("" : "+x"(sum));  // added now: put off, the products of a whole group would leave their registers
    return sum;
  }
  static Register widen(Register sum, Register part) { return _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1))); }
};

}  // namespace

const Family& avx2_integers(int bits) { return bits == 8 ? IntegerFamily<Pairs, 8>::family : IntegerFamily<Bytes, 4>::family; }

}  // namespace echelon::linear

#pragma GCC pop_options
