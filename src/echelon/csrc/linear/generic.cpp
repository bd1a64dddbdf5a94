// Linear layers for any processor: four lanes, no fused multiply-add.
#include <emmintrin.h>

#include "linear.h"

namespace echelon::linear {
namespace {

struct Vector {
  typedef float Register __attribute__((vector_size(16), aligned(2), may_alias));
  typedef uint32_t Bits __attribute__((vector_size(16), aligned(2), may_alias));
  static constexpr const char* name = "generic";
  static constexpr int width = 4, most_rows = 4, most_sums = 8, short_block = 0;

  static Register load(const float* p) { return *reinterpret_cast<const Register*>(p); }
  static void store(float* p, Register v) { *reinterpret_cast<Register*>(p) = v; }
  static Register broadcast(const float* p) { return Register{*p, *p, *p, *p}; }
  static Register fma(Register a, Register b, Register c) { return a * b + c; }
  static Register even(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) << 16); }
  static Register odd(const uint16_t* p) { return reinterpret_cast<Register>(*reinterpret_cast<const Bits*>(p) & 0xffff0000u); }
  static Register f16(const uint16_t* p);
};

}  // namespace
}  // namespace echelon::linear

#include "fma.h"
#include "integers.h"

namespace echelon::linear {

Vector::Register Vector::f16(const uint16_t* p) {
  return Register{to_float(p[0], Storage::float16), to_float(p[1], Storage::float16), to_float(p[2], Storage::float16), to_float(p[3], Storage::float16)};
}

const Family& generic_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear

namespace echelon::linear {
namespace {

// Products of pairs of int16: four entries of x are two pairs, and so are the even and odd bytes of the weight.
struct Pairs {
  using Register = __m128i;
  using Floats = __m128;
  static constexpr const char* name = "generic";
  static constexpr int width = 4, most_rows = 4, entry_bytes = 8, few_rows = 2;
  static constexpr bool narrow = false;
  static constexpr int at_once(int rows) { return rows == 1 ? 4 : 2; }
  struct Quads {
    Register even, odd;
  };
  using Entry = Quads;

  static Register load(const void* p) { return _mm_loadu_si128(static_cast<const Register*>(p)); }
  static void store(void* p, Register v) { _mm_storeu_si128(static_cast<Register*>(p), v); }
  static Register all(int32_t v) { return _mm_set1_epi32(v); }
  static Register bytes(const uint8_t* p) { return _mm_set_epi32(p[3], p[2], p[1], p[0]); }
  static Register multiply_low(Register a, Register b) { return _mm_madd_epi16(a, b); }
  static Quads quads(Register v) { return {_mm_and_si128(v, _mm_set1_epi16(255)), _mm_srli_epi16(v, 8)}; }
  static Register low(Register v) { return _mm_and_si128(v, _mm_set1_epi8(15)); }
  static Register high(Register v) { return low(_mm_srli_epi16(v, 4)); }
  static int32_t word(const char* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
  }
  static Entry entry(const char* x) { return {all(word(x)), all(word(x + 4))}; }
  static Register dot(Register sum, Quads w, Entry x) {
    return _mm_add_epi32(_mm_add_epi32(sum, _mm_madd_epi16(w.even, x.even)), _mm_madd_epi16(w.odd, x.odd));
  }
  static Floats load_floats(const float* p) { return _mm_loadu_ps(p); }
  static void store_floats(float* p, Floats v) { _mm_storeu_ps(p, v); }
  static Floats half_floats(const uint16_t* p) {
    return _mm_set_ps(widen_float16(p[3]), widen_float16(p[2]), widen_float16(p[1]), widen_float16(p[0]));
  }
  static Floats to_floats(Register v) { return _mm_cvtepi32_ps(v); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
};

}  // namespace

const Family& generic_integers(int bits) { return bits == 8 ? IntegerFamily<Pairs, 8>::family : IntegerFamily<Pairs, 4>::family; }

}  // namespace echelon::linear
