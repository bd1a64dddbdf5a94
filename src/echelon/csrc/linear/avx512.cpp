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
  static constexpr int width = 16, most_rows = 13, most_sums = 26;

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

namespace echelon::linear {

const Family& avx512_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear

#pragma GCC pop_options
