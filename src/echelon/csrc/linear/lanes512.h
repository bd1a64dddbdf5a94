// Registers of 512 bits: 16 lanes of int32, or as many of float32. Included inside a target section that has them. No STL here.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace echelon::linear {
namespace {

struct Lanes512 {
  using Register = __m512i;
  using Floats = __m512;
  static constexpr int width = 16;

  static Register load(const void* p) { return _mm512_loadu_si512(p); }
  static void store(void* p, Register v) { _mm512_storeu_si512(p, v); }
  static Register all(int32_t v) { return _mm512_set1_epi32(v); }
  static Register bytes(const uint8_t* p) { return _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Register multiply_low(Register a, Register b) { return _mm512_madd_epi16(a, b); }
  static Register low(Register v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
  static Register high(Register v) { return low(_mm512_srli_epi16(v, 4)); }
  static int32_t word(const char* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
  }
  static Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static void store_floats(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats half_floats(const uint16_t* p) { return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Floats to_floats(Register v) { return _mm512_maskz_cvtepi32_ps(0xffff, v); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_add_ps(_mm512_mul_ps(a, b), c); }
};

}  // namespace
}  // namespace echelon::linear
