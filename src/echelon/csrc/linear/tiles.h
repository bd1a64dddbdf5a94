// The control flow of AMX, over a `Tiles` that is either the processor's or emulated:
//   bits of the weight's integers, or 0 for bfloat16, and x_entry, bytes of an entry of x: entries of K go in fours or pairs, so that the
//   layout in bytes is the same, once integers of 4 bits have been put back as bytes;
//   zero-based tiles c0 … c3 (16 × 16 float32 or int32), a0, a1 (16 rows × 64 bytes of x), b0, b1 (16 fours or pairs of K × 16 columns);
//   load<i>(p, stride in bytes), store<i>(p, stride in bytes), zero<i>(), dot<c, a, b>(): c += a · b;
//   widen(const uint16_t* float16, float*): a tile's scales.
// A block has 16 or 32 rows; numbers of rows that are no multiple of 16 are filled up with zeros. No STL here.
#pragma once

#include "finish.h"

namespace echelon::linear {
namespace {

// Of a row of a depth block: with 64 KiB of weight loads and stores of sums are rare; of 4 bits there are as many groups as have sums beside x.
template <class Tiles>
constexpr int64_t tile_x_bytes = Tiles::bits == 4 ? 256 : 2048;
template <class Tiles>
constexpr int64_t tile_x_stride = tile_x_bytes<Tiles> + x_padding;

template <class Tiles, int units>
void multiply_tiles(const void* x, const void* w, int64_t steps, float* sums, Prefetch, Integers) {
  constexpr int64_t sums_stride = tile * 4, w_stride = tile * 4;
  const char* upper = static_cast<const char*>(x);
  const char* lower = upper + 16 * tile_x_stride<Tiles>;
  const char* left = static_cast<const char*>(w);
  Tiles tiles;
  tiles.template load<0>(sums, sums_stride);
  tiles.template load<1>(sums + 16, sums_stride);
  if constexpr (units == 2) {
    tiles.template load<2>(sums + 16 * tile, sums_stride);
    tiles.template load<3>(sums + 16 * tile + 16, sums_stride);
  }
  for (int64_t s = 0; s < steps; s += 16, upper += 64, lower += 64, left += 16 * w_stride) {
    tiles.template load<6>(left, w_stride);
    tiles.template load<7>(left + 64, w_stride);
    tiles.template load<4>(upper, tile_x_stride<Tiles>);
    tiles.template dot<0, 4, 6>();
    tiles.template dot<1, 4, 7>();
    if constexpr (units == 2) {
      tiles.template load<5>(lower, tile_x_stride<Tiles>);
      tiles.template dot<2, 5, 6>();
      tiles.template dot<3, 5, 7>();
    }
  }
  tiles.template store<0>(sums, sums_stride);
  tiles.template store<1>(sums + 16, sums_stride);
  if constexpr (units == 2) {
    tiles.template store<2>(sums + 16 * tile, sums_stride);
    tiles.template store<3>(sums + 16 * tile + 16, sums_stride);
  }
}

// Entries of 4 bits as bytes, in the order of a weight of 8: `steps` of eight for every column.
inline void spread(const uint8_t* __restrict halves, int64_t steps, uint8_t* __restrict bytes) {
  for (int64_t s = 0; s < steps; ++s)
    for (int64_t i = 0; i < tile * 4; ++i) {
      bytes[s * 8 * tile + i] = halves[s * 4 * tile + i] & 15;
      bytes[s * 8 * tile + 4 * tile + i] = halves[s * 4 * tile + i] >> 4;
    }
}

// A group of 4 bits: products of all its entries, and then their scales.
template <class Tiles, int units>
void multiply_groups(const void* x, const void* w, int64_t steps, float* sums, Prefetch, Integers integers) {
  constexpr int64_t stride = tile * 4, x_stride = tile_x_stride<Tiles>, whole = 64;  // entries of K in a tile register
  static_assert(tile_x_bytes<Tiles> / 32 == sizeof(Rounded::sums) / 4);
  alignas(64) uint8_t bytes[128 * tile];
  alignas(64) int32_t products[units * 16][tile];
  alignas(64) float scales[tile];
  std::memset(bytes + integers.group * tile, 0, integers.group < whole ? (whole - integers.group) * tile : 0);  // what x has there belongs to others
  const uint8_t* data = static_cast<const uint8_t*>(w);
  const char* group_x = static_cast<const char*>(x);
  const char* group_sums = group_x + tile_x_bytes<Tiles>;
  Tiles tiles;
  for (int64_t s = 0; s < steps; s += integers.group / 8, group_x += integers.group, group_sums += 4) {
    const uint8_t *const of_columns = data, *const zeros = data + 2 * tile;
    data += tile * (integers.has_zeros ? 3 : 2);
    spread(data, integers.group / 8, bytes);
    data += integers.group / 8 * stride;
    tiles.template zero<0>();
    tiles.template zero<1>();
    if constexpr (units == 2) {
      tiles.template zero<2>();
      tiles.template zero<3>();
    }
    for (int64_t k = 0; k < integers.group; k += whole) {
      tiles.template load<6>(bytes + k * tile, stride);
      tiles.template load<7>(bytes + k * tile + 64, stride);
      tiles.template load<4>(group_x + k, x_stride);
      tiles.template dot<0, 4, 6>();
      tiles.template dot<1, 4, 7>();
      if constexpr (units == 2) {
        tiles.template load<5>(group_x + k + 16 * x_stride, x_stride);
        tiles.template dot<2, 5, 6>();
        tiles.template dot<3, 5, 7>();
      }
    }
    tiles.template store<0>(products[0], stride);
    tiles.template store<1>(products[0] + 16, stride);
    if constexpr (units == 2) {
      tiles.template store<2>(products[16], stride);
      tiles.template store<3>(products[16] + 16, stride);
    }
    Tiles::widen(reinterpret_cast<const uint16_t*>(of_columns), scales);
    for (int64_t r = 0; r < units * 16; ++r) {
      float* __restrict to = sums + r * tile;
      const int32_t* __restrict own = products[r];
      int32_t shift;
      std::memcpy(&shift, group_sums + r * x_stride, 4);
      if (integers.has_zeros)
        for (int64_t c = 0; c < tile; ++c) to[c] += static_cast<float>(own[c] + shift * zeros[c]) * scales[c];
      else
        for (int64_t c = 0; c < tile; ++c) to[c] += static_cast<float>(own[c] + shift) * scales[c];
    }
  }
}

template <class Tiles>
void pack_x_tiles(const void* x, int64_t count, void* packed) {
  const int64_t bytes = count * Tiles::x_entry;
  std::memcpy(packed, x, bytes);
  std::memset(static_cast<char*>(packed) + bytes, 0, tile_x_bytes<Tiles> - bytes);
}

template <class Tiles, int units>
constexpr Family::Multiply multiply_of() {
  if constexpr (Tiles::bits == 4)
    return multiply_groups<Tiles, units>;
  else
    return multiply_tiles<Tiles, units>;
}

template <class Tiles>
constexpr Family tile_family(const char* name) {
  constexpr int64_t depth_block = tile_x_bytes<Tiles> / Tiles::x_entry;
  return {name, 16, 2, depth_block, Tiles::bits == 4 ? depth_block : depth_block / 2, Tiles::x_entry, 2, pack_x_tiles<Tiles>,
          {multiply_of<Tiles, 1>(), multiply_of<Tiles, 2>()}, finish<Tiles::bits>, Tiles::enter, Tiles::leave};
}

}  // namespace
}  // namespace echelon::linear
