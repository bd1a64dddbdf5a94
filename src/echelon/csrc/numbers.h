// Arithmetic that several kernels share. Written so that loops over it vectorise, and so that every processor gives the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "isa.h"
#include "types.h"

#define ALWAYS_INLINE __attribute__((always_inline))
#define INLINE static inline ALWAYS_INLINE
#define INLINE_METHOD inline ALWAYS_INLINE

namespace echelon {

template <class Work>
__attribute__((target("arch=x86-64-v4"), noinline)) auto with_avx512(const Work& work) {
  return work();
}
template <class Work>
__attribute__((target("arch=x86-64-v3"), noinline)) auto with_avx2(const Work& work) {
  return work();
}

// Runs `work`, an ALWAYS_INLINE lambda over INLINE functions, in the build of it that the active features allow. All builds give the same
// bits, for none contracts multiplications and additions.
template <class Work>
auto by_features(const Work& work) {
  const Features features = active_features();
  return has(features, avx512) ? with_avx512(work) : has(features, avx2) ? with_avx2(work) : work();
}

constexpr int64_t scale_bytes = sizeof(float);  // behind a key or value that is rounded to 8 bits

// 16-bit numbers by their bits, so that one loop serves every processor.
INLINE float widen_bfloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

INLINE uint16_t narrow_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
  const uint32_t quiet = bits >> 16 | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Shift the exponent by a multiplication, which also serves subnormal numbers.
INLINE float widen_float16(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t is_special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  const uint32_t bits = std::bit_cast<uint32_t>(scaled) | is_special;
  return std::bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000u) << 16);
}

INLINE uint16_t narrow_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  // below 2⁻¹⁴ the sum with 0.5 puts the rounded value into the low bits of the significand
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
}

template <Storage type>
struct Number;
template <>
struct Number<Storage::float32> {
  using Stored = float;
  INLINE float widen(float v) { return v; }
  INLINE float narrow(float v) { return v; }
};
template <>
struct Number<Storage::bfloat16> {
  using Stored = uint16_t;
  INLINE float widen(uint16_t v) { return widen_bfloat16(v); }
  INLINE uint16_t narrow(float v) { return narrow_bfloat16(v); }
};
template <>
struct Number<Storage::float16> {
  using Stored = uint16_t;
  INLINE float widen(uint16_t v) { return widen_float16(v); }
  INLINE uint16_t narrow(float v) { return narrow_float16(v); }
};

// eˣ = 2ⁿ · e^r for |r| ≤ ln 2 / 2: replaces x by e^r, by its series, and returns n. Of a number, or of a vector of them.
template <class Float>
INLINE Float reduced_exponential(Float& x) {
  const Float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // the sum rounds to an integer
  const Float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  x = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  x = x * r + 1.0f / 120.0f;
  x = x * r + 1.0f / 24.0f;
  x = x * r + 1.0f / 6.0f;
  x = x * r + 0.5f;
  x = x * r + 1.0f;
  x = x * r + 1.0f;
  return n;
}

// eˣ for x ≤ 88, with a relative error below 3e-7. x is cut to −87.
INLINE float exponential_up_to_88(float x) {
  x = x < -87.0f ? -87.0f : x;  // not std::max, whose references keep a loop from being vectorised
  const float n = reduced_exponential(x);
  return x * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

// The same of any x, which is cut to [−87, 88].
INLINE float exponential(float x) { return exponential_up_to_88(x > 88.0f ? 88.0f : x); }

// eˣ for x ≤ 0, with a relative error below 1e-15. x is cut to −700.
INLINE double exponential(double x) {
  x = x < -700.0 ? -700.0 : x;
  const double n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0;
  const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const int64_t exponent = std::bit_cast<int64_t>(n + 6755399441055744.0) << 52;  // the low bits of the sum are n
  return std::bit_cast<double>(std::bit_cast<int64_t>(p) + exponent);
}

}  // namespace echelon
