// What every family does around its sums: bias, activation, rounding. Included inside a family's target section, so that the
// loops below are compiled for it; plain arithmetic without contraction, so that all families agree. No STL here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"

namespace echelon::linear {
namespace {

inline float to_float(uint16_t bits, Storage type) {
  if (type == Storage::bfloat16) return widen_bfloat16(bits);
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return half;
}

// eˣ: Cephes' polynomial (S. Moshier, expf) after x = n ln 2 + r; two units in the last place. NaN stays NaN.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  constexpr float magic = 12582912.0f;  // 1.5 · 2²³: adding it rounds to an integer, which its low bits then hold
  const float shifted = x * 1.44269504088896341f + magic;
  const float n = shifted - magic;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  const int32_t power = static_cast<int32_t>((static_cast<uint32_t>(bits) - 0x4b400000u + 127u) << 23);
  float scale;
  std::memcpy(&scale, &power, 4);
  return p * scale;
}

inline void activate(Activation activation, float* v) {
  switch (activation) {
    case Activation::none:
      return;
    case Activation::relu:
      for (int i = 0; i < tile; ++i) v[i] = v[i] < 0.0f ? 0.0f : v[i];
      return;
    case Activation::silu:
      for (int i = 0; i < tile; ++i) v[i] = v[i] / (1.0f + exponential(-v[i]));
      return;
    case Activation::gelu:
      for (int i = 0; i < tile; ++i) v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752f));
      return;
    case Activation::gelu_tanh:  // ½ v (1 + tanh u) = v / (1 + e^(−2u)), u = √(2/π) (v + 0.044715 v³)
      for (int i = 0; i < tile; ++i) {
        const float u2 = 1.59576912160573080f * (v[i] + 0.044715f * v[i] * v[i] * v[i]);
        v[i] = v[i] / (1.0f + exponential(-u2));
      }
      return;
  }
}

inline void round_row(const float* v, Storage type, uint16_t* out) {
  if (type == Storage::float16) {
    for (int i = 0; i < tile; ++i) {
      const _Float16 half = static_cast<_Float16>(v[i]);
      std::memcpy(out + i, &half, 2);
    }
    return;
  }
  for (int i = 0; i < tile; ++i) out[i] = narrow_bfloat16(v[i]);
}

// Sums are what x and the weight, whose integers have so many bits (0: it has none), gave.
template <int bits>
void finish(const Problem& problem, int64_t t, int64_t first_row, int64_t rows, const float* sums, Family::AfterX after_x) {
  const Storage type = problem.weight.type;
  const int64_t column = t * tile, left = problem.weight.columns - column, count = left < tile ? left : tile;
  const bool is_f32 = problem.out_is_f32 || type == Storage::float32;
  float bias[tile] = {};
  if (problem.bias) std::memcpy(bias, problem.bias + column, count * 4);
  [[maybe_unused]] float scales[tile];
  if constexpr (bits != 0) std::memcpy(scales, static_cast<const char*>(problem.weight.data) + t * tile_bytes(problem.weight), sizeof scales);
  for (int64_t r = 0; r < rows; ++r, sums += tile) {
    alignas(64) float v[tile];
    alignas(64) uint16_t rounded[tile];
    if constexpr (bits == 0) {
      for (int i = 0; i < tile; ++i) v[i] = sums[i] + bias[i];
    } else {
      Rounded of_row;
      std::memcpy(&of_row, after_x.first + r * after_x.stride, sizeof of_row);
      if constexpr (bits == 8) {
        uint32_t integers[tile];  // which go around where their sign does not fit beside them; the result fits
        std::memcpy(integers, sums, sizeof integers);
        const uint32_t too_much = 128u * static_cast<uint32_t>(of_row.sum);  // negated
        for (int i = 0; i < tile; ++i) v[i] = static_cast<float>(static_cast<int32_t>(integers[i] + too_much));
      } else {
        std::memcpy(v, sums, sizeof v);
      }
      for (int i = 0; i < tile; ++i) v[i] = v[i] * (of_row.scale * scales[i]) + bias[i];
    }
    activate(problem.activation, v);
    const int64_t at = (first_row + r) * problem.out_stride + column;
    if (is_f32) {
      std::memcpy(static_cast<float*>(problem.out) + at, v, count * 4);
    } else {
      round_row(v, type, rounded);
      std::memcpy(static_cast<uint16_t*>(problem.out) + at, rounded, count * 2);
    }
  }
}

inline void nothing() {}

}  // namespace
}  // namespace echelon::linear
