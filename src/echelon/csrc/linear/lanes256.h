// Registers of 256 bits: 8 lanes of int32, or as many of float32. Included inside a target section that has them. No STL here.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace echelon::linear {
namespace {

struct Lanes256 {
  using Register = __m256i;
  using Floats = __m256;
  static constexpr int width = 8;

  static Register load(const void* p) { return _mm256_loadu_si256(static_cast<const Register*>(p)); }
  static void store(void* p, Register v) { _mm256_storeu_si256(static_cast<Register*>(p), v); }
  static Register all(int32_t v) { return _mm256_set1_epi32(v); }
  static Register bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
  static Register multiply_low(Register a, Register b) { return _mm256_madd_epi16(a, b); }
  static Register low(Register v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
  static Register high(Register v) { return low(_mm256_srli_epi16(v, 4)); }
  static int32_t word(const char* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
  }
  static Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
  static void store_floats(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  static Floats half_floats(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Floats to_floats(Register v) { return _mm256_cvtepi32_ps(v); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_add_ps(_mm256_mul_ps(a, b), c); }
};

}  // namespace
}  // namespace echelon::linear
