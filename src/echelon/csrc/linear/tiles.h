// The control flow of AMX, over a `Tiles` that is either the processor's or emulated:
//   bits of the weight's integers, or 0 for bfloat16, and x_entry, bytes of an entry of x: entries of K go in fours or pairs, so that the
//   layout in bytes is the same, once integers of 4 bits have been put back as bytes, from which their zeros are subtracted;
//   zero-based tiles c0 … c3 (16 × 16 float32 or int32), a0, a1 (16 rows × 64 bytes of x), b0, b1 (16 fours or pairs of K × 16 columns);
//   load<i>(p, stride in bytes), store<i>(p, stride in bytes), zero<i>(), dot<c, a, b>(): c += a · b, with signs in b where it had 4 bits;
//   widen(const uint16_t* float16, float*): a tile's scales.
// A block has 16 or 32 rows; numbers of rows that are no multiple of 16 are filled up with zeros. No STL here.
#pragma once

#include "finish.h"

namespace echelon::linear {
namespace {

constexpr int64_t tile_x_bytes = 2048;  // of a row of a depth block, 64 KiB of weight beside it: loads and stores of sums are rare
constexpr int64_t tile_x_stride = tile_x_bytes + x_padding;

// Fetches a block of weight before it is multiplied: its lines for the first-level cache, and some from `far` on for the second, of every
// `apart` one. Tile registers do not wait for each other long enough to let memory work meanwhile.
template <int64_t bytes, int64_t far, int64_t apart>
inline __attribute__((always_inline)) void fetch_block(const void* at) {
  constexpr int64_t near = 2048, line = 64;
  const char* from = static_cast<const char*>(at);
#pragma GCC unroll 32
  for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(from + near + i);
#pragma GCC unroll 32
  for (int64_t i = 0; i < bytes; i += apart * line) __builtin_prefetch(from + far + i, 0, 2);
}

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
    fetch_block<16 * w_stride, 4096, 4>(left);
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

// A group's entries of 4 bits, less their zeros, as bytes in the order of a weight of 8: `steps` of eight for every column.
inline void spread(const uint8_t* __restrict group, bool has_zeros, int64_t steps, int8_t* __restrict bytes) {
  constexpr int64_t line = tile * 4;
  alignas(64) int8_t zeros[line];
  for (int64_t i = 0; i < line; ++i) zeros[i] = has_zeros ? static_cast<int8_t>(group[2 * tile + i / 4]) : 8;
  const uint8_t* __restrict halves = group + tile * (has_zeros ? 3 : 2);
  for (int64_t s = 0; s < steps; ++s, halves += line, bytes += 2 * line) {
    fetch_block<line, 8192, 1>(halves);
    for (int64_t i = 0; i < line; ++i) {
      bytes[i] = static_cast<int8_t>((halves[i] & 15) - zeros[i]);
      bytes[line + i] = static_cast<int8_t>((halves[i] >> 4) - zeros[i]);
    }
  }
}

// Groups of 4 bits: products of all entries of one, and then their scales. While tile registers multiply a group, the next one is put back as
// bytes and the last one is scaled.
template <class Tiles, int units>
void multiply_groups(const void* x, const void* w, int64_t steps, float* sums, Prefetch, Integers integers) {
  constexpr int64_t stride = tile * 4, whole = 64;  // entries of K in a tile register
  const int64_t group_steps = integers.group / 8, groups = steps / group_steps;
  const int64_t group_bytes = tile * (integers.has_zeros ? 3 : 2) + group_steps * stride;
  const uint8_t* data = static_cast<const uint8_t*>(w);
  const char* group_x = static_cast<const char*>(x);
  alignas(64) int8_t bytes[2][128 * tile];
  alignas(64) int32_t products[2][units * 16][tile];
  for (auto& own : bytes)  // what x has there belongs to others
    std::memset(own + integers.group * tile, 0, integers.group < whole ? (whole - integers.group) * tile : 0);
  const auto scale = [&](int64_t g) {
    alignas(64) float scales[tile];
    Tiles::widen(reinterpret_cast<const uint16_t*>(data + g * group_bytes), scales);
    for (int64_t r = 0; r < units * 16; ++r) {
      float* __restrict to = sums + r * tile;
      const int32_t* __restrict own = products[g % 2][r];
      for (int64_t c = 0; c < tile; ++c) to[c] += static_cast<float>(own[c]) * scales[c];
    }
  };
  Tiles tiles;
  spread(data, integers.has_zeros, group_steps, bytes[0]);
  for (int64_t g = 0; g < groups; ++g, group_x += integers.group) {
    const int8_t* own = bytes[g % 2];
    tiles.template zero<0>();
    tiles.template zero<1>();
    if constexpr (units == 2) {
      tiles.template zero<2>();
      tiles.template zero<3>();
    }
    for (int64_t k = 0; k < integers.group; k += whole) {
      tiles.template load<6>(own + k * tile, stride);
      tiles.template load<7>(own + k * tile + 64, stride);
      tiles.template load<4>(group_x + k, tile_x_stride);
      tiles.template dot<0, 4, 6>();
      tiles.template dot<1, 4, 7>();
      if constexpr (units == 2) {
        tiles.template load<5>(group_x + k + 16 * tile_x_stride, tile_x_stride);
        tiles.template dot<2, 5, 6>();
        tiles.template dot<3, 5, 7>();
      }
    }
    if (g + 1 < groups) spread(data + (g + 1) * group_bytes, integers.has_zeros, group_steps, bytes[(g + 1) % 2]);
    if (g) scale(g - 1);
    auto& to = products[g % 2];
    tiles.template store<0>(to[0], stride);
    tiles.template store<1>(to[0] + 16, stride);
    if constexpr (units == 2) {
      tiles.template store<2>(to[16], stride);
      tiles.template store<3>(to[16] + 16, stride);
    }
  }
  scale(groups - 1);
}

template <class Tiles>
void pack_x_tiles(const void* x, int64_t count, void* packed) {
  const int64_t bytes = count * Tiles::x_entry;
  std::memcpy(packed, x, bytes);
  std::memset(static_cast<char*>(packed) + bytes, 0, tile_x_bytes - bytes);
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
  constexpr int64_t depth_block = tile_x_bytes / Tiles::x_entry;
  return {name, 16, 2, depth_block, depth_block / 2, Tiles::x_entry, 2, pack_x_tiles<Tiles>,
          {multiply_of<Tiles, 1>(), multiply_of<Tiles, 2>()}, finish<Tiles::bits>, Tiles::enter, Tiles::leave};
}

}  // namespace
}  // namespace echelon::linear
