// The control flow of AMX, over a `Tiles` that is either the processor's or emulated:
//   bits of the weight's integers, or 0 for bfloat16, and x_entry, bytes of an entry of x: entries of K go in fours or pairs, so that the
//   layout in bytes is the same;
//   zero-based tiles c0 … c3 (16 × 16 float32 or int32), a0, a1 (16 rows × 64 bytes of x), b0, b1 (16 fours or pairs of K × 16 columns);
//   load<i>(p, stride in bytes), store<i>(p, stride in bytes), dot<c, a, b>(): c += a · b.
// A block has 16 or 32 rows; numbers of rows that are no multiple of 16 are filled up with zeros. No STL here.
#pragma once

#include "finish.h"

namespace echelon::linear {
namespace {

constexpr int64_t tile_x_bytes = 2048;  // of a row of a depth block, which has 64 KiB of weight: loads and stores of sums are rare
constexpr int64_t tile_x_stride = tile_x_bytes + x_padding;

template <class Tiles, int units>
void multiply_tiles(const void* x, const void* w, int64_t steps, float* sums, Prefetch, Integers) {
  constexpr int64_t sums_stride = tile * 4, w_stride = tile * 4;
  const char* upper = static_cast<const char*>(x);
  const char* lower = upper + 16 * tile_x_stride;
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
    tiles.template load<4>(upper, tile_x_stride);
    tiles.template dot<0, 4, 6>();
    tiles.template dot<1, 4, 7>();
    if constexpr (units == 2) {
      tiles.template load<5>(lower, tile_x_stride);
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

template <class Tiles>
void pack_x_tiles(const void* x, int64_t count, void* packed) {
  const int64_t bytes = count * Tiles::x_entry;
  std::memcpy(packed, x, bytes);
  std::memset(static_cast<char*>(packed) + bytes, 0, tile_x_bytes - bytes);
}

template <class Tiles>
constexpr Family tile_family(const char* name) {
  constexpr int64_t depth_block = tile_x_bytes / Tiles::x_entry;
  return {name, 16, 2, depth_block, depth_block / 2, Tiles::x_entry, 2, pack_x_tiles<Tiles>, {multiply_tiles<Tiles, 1>, multiply_tiles<Tiles, 2>},
          finish<Tiles::bits>, Tiles::enter, Tiles::leave};
}

}  // namespace
}  // namespace echelon::linear
