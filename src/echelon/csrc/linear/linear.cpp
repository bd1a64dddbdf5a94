#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace echelon::linear {
namespace {

// Bytes of weight between what is multiplied and what is fetched. Of integers they are a block of depth: its columns may be gone over twice.
constexpr int64_t near = 1024, near_of_integers = 4096, far = 32768;
constexpr int64_t most_without_tiles = 6;  // rows up to which VPDPBUSD is as fast as tile registers of 16
constexpr int64_t sums_budget = 256 * 1024;  // bytes of sums that a worker keeps at hand: part of a second-level cache

int64_t grain(Storage type) { return type == Storage::bfloat16 ? 2 : 1; }  // entries of K that lie side by side
int64_t grain(const Weight& weight) { return weight.integers.bits ? 32 / weight.integers.bits : grain(weight.type); }

int64_t head_bytes(const Integers& integers) { return integers.bits ? tile * 4 : 0; }
int64_t group_head_bytes(const Integers& integers) { return tile * (integers.has_zeros ? 3 : 2); }

// Bytes of the packed tile, its head aside, up to entry k of K (a multiple of the grain, and of the group).
int64_t tile_offset(int64_t k, const Weight& weight) {
  const Integers& integers = weight.integers;
  if (integers.bits == 0) return k * tile * size_of(weight.type);
  return k * tile * integers.bits / 8 + (integers.bits == 4 ? k / integers.group * group_head_bytes(integers) : 0);
}

template <class T>
void pack_tile(const T* source, int64_t row_stride, int64_t column_stride, int64_t columns, int64_t depth, int64_t padded, int64_t grain,
               T* out) {
  constexpr int64_t chunk = 32;  // entries of one row in a go: the rows' lines may compete for the same cache sets
  for (int64_t start = 0; start < padded; start += chunk)
    for (int64_t n = 0; n < tile; ++n) {
      const T* row = source + n * row_stride;
      T* to = out + start * tile + n * grain;
      for (int64_t k = start; k < std::min(start + chunk, padded); k += grain, to += tile * grain)
        for (int64_t i = 0; i < grain; ++i) to[i] = n < columns && k + i < depth ? row[(k + i) * column_stride] : T{0};
    }
}

template <class T>
void pack_range(const void* source, int64_t row_stride, int64_t column_stride, int64_t columns, int64_t depth, Storage type, int64_t first,
                int64_t last, void* packed) {
  const int64_t padded = padded_depth({nullptr, columns, depth, type});
  for (int64_t t = first; t < last; ++t)
    pack_tile(static_cast<const T*>(source) + t * tile * row_stride, row_stride, column_stride, columns - t * tile, depth, padded,
              grain(type), static_cast<T*>(packed) + t * tile * padded);
}

// The largest power of two that a column's scales can be multiplied by without leaving float16; its inverse stands in the tile's head.
float factor_of(const float* scales, int64_t count) {
  float largest = 0.0f;
  for (int64_t g = 0; g < count; ++g) largest = std::max(largest, std::abs(scales[g]));
  return largest > 0.0f ? std::ldexp(1.0f, 14 - std::max(std::ilogb(largest), -100)) : 1.0f;
}

void pack_bytes(const uint8_t* const* rows, const Weight& weight, char* to) {
  for (int64_t k = 0; k < padded_depth(weight); ++k)
    for (int64_t n = 0; n < tile; ++n) to[k / 4 * 4 * tile + n * 4 + k % 4] = static_cast<char>(rows[n] && k < weight.depth ? rows[n][k] : 128);
}

void pack_halves(const uint8_t* const* rows, const Quantised& source, const Weight& weight, int64_t first_column, const float* factors, char* to) {
  const int64_t group = weight.integers.group, groups = weight.depth / group;
  for (int64_t g = 0; g < groups; ++g, to += tile_offset(group, weight)) {
    char* data = to + group_head_bytes(weight.integers);
    for (int64_t n = 0; n < tile; ++n) {
      const int64_t at = (first_column + n) * groups + g;
      const uint16_t scale = rows[n] ? narrow_float16(source.scales[at] * factors[n]) : 0;
      std::memcpy(to + 2 * n, &scale, 2);
      if (weight.integers.has_zeros) to[2 * tile + n] = static_cast<char>(rows[n] ? source.zeros[at] : 8);
      for (int64_t k = 0; k < group; ++k) {
        char& halves = data[k / 8 * 4 * tile + n * 4 + k % 4];
        const int value = rows[n] ? rows[n][g * group + k] : 8;
        halves = static_cast<char>(k % 8 < 4 ? value : (halves & 15) | value << 4);
      }
    }
  }
}

// Entry `i` of `n` things shared out among `parts`.
int64_t share(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

}  // namespace

int64_t size_of(Storage type) { return type == Storage::float32 ? 4 : 2; }

int64_t padded_depth(const Weight& weight) {
  const int64_t whole = weight.integers.bits == 8 ? 64 : weight.integers.bits == 4 ? weight.integers.group : weight.type == Storage::bfloat16 ? 32 : 1;
  return (weight.depth + whole - 1) / whole * whole;
}

int64_t tile_bytes(const Weight& weight) { return head_bytes(weight.integers) + tile_offset(padded_depth(weight), weight); }

void pack_tiles(const void* source, int64_t row_stride, int64_t column_stride, int64_t columns, int64_t depth, Storage type, int64_t first,
                int64_t last, void* packed) {
  const auto pack = type == Storage::float32 ? pack_range<uint32_t> : pack_range<uint16_t>;
  pack(source, row_stride, column_stride, columns, depth, type, first, last, packed);
}

void pack_tiles(const Quantised& source, const Weight& weight, int64_t first, int64_t last, void* packed) {
  for (int64_t t = first; t < last; ++t) {
    char* to = static_cast<char*>(packed) + t * tile_bytes(weight);
    const uint8_t* rows[tile] = {};
    float head[tile] = {}, factors[tile];
    const int64_t column = t * tile, count = std::min(tile, weight.columns - column);
    const int64_t groups = weight.integers.bits == 4 ? weight.depth / weight.integers.group : 1;
    for (int64_t n = 0; n < count; ++n) {
      const float* scales = source.scales + (column + n) * groups;
      rows[n] = source.values + (column + n) * weight.depth;
      factors[n] = factor_of(scales, groups);
      head[n] = weight.integers.bits == 4 ? 1.0f / factors[n] : *scales;
    }
    std::memcpy(to, head, sizeof head);
    if (weight.integers.bits == 4)
      pack_halves(rows, source, weight, column, factors, to + sizeof head);
    else
      pack_bytes(rows, weight, to + sizeof head);
  }
}

void unpack_row(const Weight& weight, int64_t row, void* out) {
  const int64_t g = grain(weight.type), chunk = g * size_of(weight.type);
  const char* from = static_cast<const char*>(weight.data) + row / tile * tile_bytes(weight) + row % tile * chunk;
  char* to = static_cast<char*>(out);
  for (int64_t k = 0; k < weight.depth; k += g, from += tile * chunk, to += chunk)
    std::memcpy(to, from, std::min(g, weight.depth - k) * size_of(weight.type));
}

const Family& family(Features features, Storage type, int bits, int64_t rows) {
  const bool has_vnni = has(features, avx512 | avx512_vnni), is_late = has(features, fetches_late);
  if (bits && has(features, avx512 | amx_int8) && (rows > most_without_tiles || !has_vnni)) return amx_integers(bits);
  if (bits && has_vnni) return avx512_vnni_integers(bits, is_late);
  if (bits && has(features, avx512)) return avx512_integers(bits);
  if (bits && has(features, avx2 | avx_vnni)) return avx_vnni_integers(bits);
  if (bits) return has(features, avx2) ? avx2_integers(bits) : generic_integers(bits);
  if (type == Storage::bfloat16 && has(features, avx512 | amx_bf16)) return amx_family();
  if (type == Storage::bfloat16 && has(features, avx512 | avx512_bf16)) return avx512_bf16_family(is_late);
  if (has(features, avx512)) return avx512_family(type);
  return has(features, avx2) ? avx2_family(type) : generic_family(type);
}

int64_t Pass::depth_blocks() const { return (padded_depth(problem.weight) + family.depth_block - 1) / family.depth_block; }

// Few rows read the weight from end to end; many rows keep x at hand for several tiles.
int64_t Pass::group() const {
  const int64_t fitting = std::clamp<int64_t>(sums_budget / (padded_rows() * tile * 4), 1, 4);
  return padded_rows() > 2 * family.unit * family.most_units ? fitting : 1;
}

Pass::Units Pass::block(int64_t b, int64_t blocks) const {
  const int64_t units = padded_rows() / family.unit;
  const bool is_short = family.short_block && blocks == 2 && units <= family.most_units + family.short_block;
  const auto first = [&](int64_t b) { return !is_short ? share(units, b, blocks) : b == 0 ? 0 : b == 1 ? units - family.short_block : units; };
  return {first(b), first(b + 1) - first(b)};
}

// Packed x is [depth block][row][depth_block entries and padding].
void Pass::pack(Worker worker, void* packed_x) const {
  for (int64_t row = worker.first(padded_rows()); row < worker.last(padded_rows()); ++row) {
    char* to = static_cast<char*>(packed_x) + row * row_bytes();
    if (row >= rows)
      for (int64_t block = 0; block < depth_blocks(); ++block) std::memset(to + block * padded_rows() * row_bytes(), 0, row_bytes());
    else if (problem.weight.integers.bits)
      pack_integers(row, to);
    else
      pack_numbers(row, to);
  }
}

void Pass::pack_numbers(int64_t row, char* to) const {
  const int64_t depth = problem.weight.depth, size = size_of(problem.weight.type);
  const char* from = static_cast<const char*>(problem.x) + (first_row + row) * problem.x_stride * size;
  for (int64_t k = 0; k < depth; k += family.depth_block, to += padded_rows() * row_bytes())
    family.pack_x(from + k * size, std::min(family.depth_block, depth - k), to);
}

void Pass::pack_integers(int64_t row, char* to) const {
  thread_local std::vector<int8_t> integers;
  thread_local std::vector<int32_t> sums;
  const int64_t depth = problem.weight.depth;
  const int64_t group = problem.weight.integers.bits == 4 ? problem.weight.integers.group : depth;
  integers.resize(depth), sums.assign(depth / group, 0);
  const char* from = static_cast<const char*>(problem.x) + (first_row + row) * problem.x_stride * size_of(problem.weight.type);
  Rounded rounded{};
  rounded.scale = round_row(from, depth, problem.weight.type, group, integers.data(), sums.data());
  rounded.sum = sums[0];
  for (int64_t k = 0; k < depth; k += family.depth_block, to += padded_rows() * row_bytes()) {
    const int64_t count = std::min(family.depth_block, depth - k);
    family.pack_x(integers.data() + k, count, to);
    if (family.sums_of_groups)
      for (int64_t g = 0; g < count / group; ++g) rounded.sums[g] = sums[k / group + g] * (problem.weight.integers.has_zeros ? 1 : 8);
    std::memcpy(to + family.depth_block * family.x_entry, &rounded, sizeof rounded);
  }
}

void Pass::multiply(int64_t first, int64_t last, const void* packed_x, float* sums) const {
  const Weight& weight = problem.weight;
  const int64_t padded = padded_depth(weight), whole_tile = tile_bytes(weight);
  const int64_t units = padded_rows() / family.unit, blocks = (units + family.most_units - 1) / family.most_units;
  const int64_t visit = blocks <= 2 ? family.few_depth : family.depth_block;
  const int64_t sums_per_tile = padded_rows() * tile, side_by_side = group();
  const char* data = static_cast<const char*>(weight.data) + head_bytes(weight.integers);
  const Family::AfterX after_x{static_cast<const char*>(packed_x) + family.depth_block * family.x_entry, row_bytes()};
  if (first >= last) return;
  family.enter();
  for (int64_t start = first; start < last; start += side_by_side) {
    const int64_t end = std::min(start + side_by_side, last);
    std::memset(sums, 0, (end - start) * sums_per_tile * 4);
    for (int64_t k = 0; k < padded; k += visit) {
      const int64_t count = std::min(visit, padded - k), steps = count / grain(weight);
      const char* x = static_cast<const char*>(packed_x) + k / family.depth_block * padded_rows() * row_bytes() +
                      k % family.depth_block * family.x_entry;
      for (int64_t t = start; t < end; ++t) {
        const char* w = data + t * whole_tile + tile_offset(k, weight);
        // The block that comes next: the next tile's at this depth, or the first tile's further down, or the next group's first, which this
        // worker is likely to take too.
        const char* next = t + 1 < end        ? w + whole_tile
                           : k + count < padded ? data + start * whole_tile + tile_offset(k + count, weight)
                                                : data + std::min(end, tiles(weight.columns) - 1) * whole_tile;
        for (int64_t b = 0; b < blocks; ++b) {
          const auto [unit, num_units] = block(b, blocks);
          const char* rows_x = x + unit * family.unit * row_bytes();
          const int64_t lines = family.lines_per_step;
          // A lone block of rows streams through the weight; of several, the first ones share out the block that comes next, and all fetch
          // the rows that come next.
          const char* ahead = blocks == 1 ? w + (weight.integers.bits ? near_of_integers : near) : next + std::min(b, lines - 1) * steps * 64;
          const Prefetch prefetch = blocks == 1 ? Prefetch{ahead, ahead + (lines - 1) * 64, w + far, (lines - 1) * 64, lines * 64}
                                                : Prefetch{ahead, rows_x + num_units * family.unit * row_bytes(), ahead + std::min(far, whole_tile / 2), 0, 64};
          family.multiply[num_units - 1](rows_x, w, steps, sums + (t - start) * sums_per_tile + unit * family.unit * tile, prefetch,
                                          weight.integers);
        }
      }
    }
    for (int64_t t = start; t < end; ++t) family.finish(problem, t, first_row, rows, sums + (t - start) * sums_per_tile, after_x);
  }
  family.leave();
}

}  // namespace echelon::linear
