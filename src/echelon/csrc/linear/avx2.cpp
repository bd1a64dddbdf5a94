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
  static constexpr int width = 8, most_rows = 6, most_sums = 12;

  static Register load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Register v) { _mm256_storeu_ps(p, v); }
  static Register broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Register fma(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256i bits(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Register even(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits(p), 16)); }
  static Register odd(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(bits(p), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Register f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
};

}  // namespace
}  // namespace echelon::linear

#include "fma.h"

namespace echelon::linear {

const Family& avx2_family(Storage type) { return fma_family(type); }

}  // namespace echelon::linear

#pragma GCC pop_options
