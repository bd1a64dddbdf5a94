#include "round.h"

namespace echelon {
namespace {

// The largest magnitude's bits, of which infinity's and NaN's are larger than any other.
template <Storage type>
INLINE float largest_of(const void* x, int64_t depth) {
  if constexpr (type == Storage::float32) {
    const uint32_t* from = static_cast<const uint32_t*>(x);
    uint32_t largest = 0;
    for (int64_t k = 0; k < depth; ++k) {
      const uint32_t bits = from[k] & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    return std::bit_cast<float>(largest);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x);
    uint16_t largest = 0;
    for (int64_t k = 0; k < depth; ++k) {
      const uint16_t bits = from[k] & 0x7fffu;
      largest = bits > largest ? bits : largest;
    }
    return Number<type>::widen(largest);
  }
}

template <Storage type>
INLINE float round_entries(const void* x, int64_t depth, int64_t group, int8_t* out, int32_t* sums) {
  const float largest = largest_of<type>(x, depth);
  const bool is_finite = largest < std::bit_cast<float>(0x7f800000u);
  const float inverse = is_finite && largest > 0x1p-100f ? 127.0f / largest : 0.0f;  // what is smaller counts as zero
  const auto* from = static_cast<const typename Number<type>::Stored*>(x);
  for (int64_t k = 0; k < depth; ++k) {
    const float scaled = is_finite ? Number<type>::widen(from[k]) * inverse : 0.0f;
    out[k] = static_cast<int8_t>(std::bit_cast<int32_t>(scaled + rounding_magic) - std::bit_cast<int32_t>(rounding_magic));
  }
  for (int64_t g = 0; g < depth / group; ++g) {
    int32_t sum = 0;
    for (int64_t k = g * group; k < (g + 1) * group; ++k) sum -= out[k];
    sums[g] = sum;
  }
  return is_finite ? largest / 127.0f : std::bit_cast<float>(0x7fc00000u);
}

}  // namespace

float round_row(const void* x, int64_t depth, Storage type, int64_t group, int8_t* out, int32_t* sums) {
  return by_features([=]() ALWAYS_INLINE {
    return type == Storage::float32    ? round_entries<Storage::float32>(x, depth, group, out, sums)
           : type == Storage::bfloat16 ? round_entries<Storage::bfloat16>(x, depth, group, out, sums)
                                       : round_entries<Storage::float16>(x, depth, group, out, sums);
  });
}

}  // namespace echelon
