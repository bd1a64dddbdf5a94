// Rows of weights rounded to integers.
#include <cmath>
#include <vector>

#include "linear.h"

namespace echelon::linear {
namespace {

template <Storage type>
INLINE void widen_row(const void* row, int64_t depth, float* out) {
  const auto* from = static_cast<const typename Number<type>::Stored*>(row);
  for (int64_t k = 0; k < depth; ++k) out[k] = Number<type>::widen(from[k]);
}

constexpr int lanes = 16;   // of sums, so that loops become vectors
constexpr int tries = 10;   // of scales on either side of the one that takes the largest entry to −8
constexpr float finer = 0.1f;

INLINE float total(const float* sums) {
  float sum = 0.0f;
  for (int i = 0; i < lanes; ++i) sum += sums[i];
  return sum;
}

// What an entry becomes under 1 / scale: −8 … 7.
INLINE float rounded(float x, float inverse) {
  const float integer = (x * inverse + rounding_magic) - rounding_magic;
  const float high = integer > 7.0f ? 7.0f : integer;
  return high < -8.0f ? -8.0f : high;
}

// 0 where all entries are finite, else NaN.
INLINE float fault_of(const float* x, int64_t count) {
  float fault = 0.0f;
  for (int64_t k = 0; k < count; ++k) fault += x[k] - x[k];
  return fault;
}

// Of integers q for x, the scale Σ q x / Σ q² leaves the least squared error, Σ x² − (Σ q x)² / Σ q². What is not finite makes it NaN, and so
// the column.
INLINE float round_group(const float* x, int64_t group, uint8_t* values) {
  if (const float fault = fault_of(x, group); fault != 0.0f) {
    for (int64_t k = 0; k < group; ++k) values[k] = 8;
    return fault;
  }
  float largest = 0.0f;
  for (int64_t k = 0; k < group; ++k) largest = std::abs(x[k]) > std::abs(largest) ? x[k] : largest;
  float best = 0.0f, best_inverse = 0.0f, scale = 1.0f;
  if (std::abs(largest) > 0x1p-100f)
    for (int t = -tries; t <= tries; ++t) {
      const float inverse = -(8.0f + finer * static_cast<float>(t)) / largest;
      float products[lanes] = {}, squares[lanes] = {};
      for (int64_t k = 0; k < group; k += lanes)
        for (int i = 0; i < lanes; ++i) {
          const float q = rounded(x[k + i], inverse);
          products[i] += q * x[k + i];
          squares[i] += q * q;
        }
      const float product = total(products), square = total(squares);
      if (product * product > best * square) best = product * product / square, best_inverse = inverse, scale = product / square;
    }
  for (int64_t k = 0; k < group; ++k) values[k] = static_cast<uint8_t>(static_cast<int>(rounded(x[k], best_inverse)) + 8);
  return scale;
}

INLINE float round_whole_row(const float* x, int64_t depth, uint8_t* values) {
  if (const float fault = fault_of(x, depth); fault != 0.0f) {
    for (int64_t k = 0; k < depth; ++k) values[k] = 128;
    return fault;
  }
  float largest = 0.0f;
  for (int64_t k = 0; k < depth; ++k) largest = std::abs(x[k]) > largest ? std::abs(x[k]) : largest;
  const bool is_zero = !(largest > 0x1p-100f);
  const float inverse = is_zero ? 0.0f : 127.0f / largest;
  for (int64_t k = 0; k < depth; ++k) values[k] = static_cast<uint8_t>(static_cast<int>((x[k] * inverse + rounding_magic) - rounding_magic) + 128);
  return is_zero ? 1.0f : largest / 127.0f;
}

}  // namespace

void round_weight(const void* row, int64_t depth, Storage type, Integers integers, uint8_t* values, float* scales) {
  std::vector<float> numbers(depth);
  float* const x = numbers.data();
  by_features([=]() ALWAYS_INLINE {
    type == Storage::float32    ? widen_row<Storage::float32>(row, depth, x)
    : type == Storage::bfloat16 ? widen_row<Storage::bfloat16>(row, depth, x)
                                : widen_row<Storage::float16>(row, depth, x);
    if (integers.bits == 8)
      *scales = round_whole_row(x, depth, values);
    else
      for (int64_t g = 0; g < depth / integers.group; ++g) scales[g] = round_group(x + g * integers.group, integers.group, values + g * integers.group);
    return 0;
  });
}

}  // namespace echelon::linear
