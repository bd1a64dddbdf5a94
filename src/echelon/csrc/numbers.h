// Arithmetic that several kernels share. Written so that loops over it vectorise, and so that every processor gives the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

// One build for every processor: the compiler makes a version for each of these and the loader picks one. All give the same bits, for the
// build contracts no multiplications and additions.
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INLINE static inline __attribute__((always_inline))

namespace echelon {

// eˣ with a relative error below 3e-7: 2ⁿ · e^r, |r| ≤ ln 2 / 2, by its series. x is cut to [−87, 88].
INLINE float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // the sum rounds to an integer
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

// eˣ for x ≤ 0, with a relative error below 1e-15. x is cut to −700.
INLINE double exponential(double x) {
  x = std::max(x, -700.0);
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
