#include "linear.h"

#include <algorithm>
#include <cstring>

namespace echelon::linear {
namespace {

constexpr int64_t near = 1024, far = 32768;  // bytes of weight between what is multiplied and what is fetched
constexpr int64_t sums_budget = 256 * 1024;  // bytes of sums that a worker keeps at hand: part of a second-level cache

int64_t grain(Storage type) { return type == Storage::bfloat16 ? 2 : 1; }  // entries of K that lie side by side

// Bytes of the packed tile up to entry k of K (a multiple of the grain).
int64_t tile_offset(int64_t k, Storage type) { return k * tile * size_of(type); }

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
  const int64_t padded = padded_depth(depth, type);
  for (int64_t t = first; t < last; ++t)
    pack_tile(static_cast<const T*>(source) + t * tile * row_stride, row_stride, column_stride, columns - t * tile, depth, padded,
              grain(type), static_cast<T*>(packed) + t * tile * padded);
}

// Entry `i` of `n` things shared out among `parts`.
int64_t share(int64_t n, int64_t part, int64_t parts) { return n * part / parts; }

}  // namespace

int64_t size_of(Storage type) { return type == Storage::float32 ? 4 : 2; }

int64_t padded_depth(int64_t depth, Storage type) { return type == Storage::bfloat16 ? (depth + 31) / 32 * 32 : depth; }

void pack_tiles(const void* source, int64_t row_stride, int64_t column_stride, int64_t columns, int64_t depth, Storage type, int64_t first,
                int64_t last, void* packed) {
  const auto pack = type == Storage::float32 ? pack_range<uint32_t> : pack_range<uint16_t>;
  pack(source, row_stride, column_stride, columns, depth, type, first, last, packed);
}

void unpack_row(const Weight& weight, int64_t row, void* out) {
  const int64_t g = grain(weight.type), chunk = g * size_of(weight.type);
  const char* from = static_cast<const char*>(weight.data) + row / tile * tile_offset(padded_depth(weight.depth, weight.type), weight.type) +
                     row % tile * chunk;
  char* to = static_cast<char*>(out);
  for (int64_t k = 0; k < weight.depth; k += g, from += tile * chunk, to += chunk)
    std::memcpy(to, from, std::min(g, weight.depth - k) * size_of(weight.type));
}

const Family& family(Features features, Storage type) {
  if (type == Storage::bfloat16 && has(features, avx512 | amx_bf16)) return amx_family();
  if (type == Storage::bfloat16 && has(features, avx512 | avx512_bf16)) return avx512_bf16_family();
  if (has(features, avx512)) return avx512_family(type);
  return has(features, avx2) ? avx2_family(type) : generic_family(type);
}

int64_t Pass::depth_blocks() const {
  return (padded_depth(problem.weight.depth, problem.weight.type) + family.depth_block - 1) / family.depth_block;
}

// Few rows read the weight from end to end; many rows keep x at hand for several tiles.
int64_t Pass::group() const {
  const int64_t fitting = std::clamp<int64_t>(sums_budget / (padded_rows() * tile * 4), 1, 4);
  return padded_rows() > 2 * family.unit * family.most_units ? fitting : 1;
}

// Packed x is [depth block][row][depth_block entries and padding].
void Pass::pack(Worker worker, void* packed_x) const {
  const int64_t depth = problem.weight.depth, size = size_of(problem.weight.type);
  for (int64_t row = worker.first(padded_rows()); row < worker.last(padded_rows()); ++row) {
    const char* from = static_cast<const char*>(problem.x) + (first_row + row) * problem.x_stride * size;
    char* to = static_cast<char*>(packed_x) + row * row_bytes();
    for (int64_t k = 0; k < depth; k += family.depth_block, to += padded_rows() * row_bytes()) {
      const int64_t count = std::min(family.depth_block, depth - k);
      if (row < rows)
        family.pack_x(from + k * size, count, to);
      else
        std::memset(to, 0, family.depth_block * family.x_entry);
    }
  }
}

void Pass::multiply(int64_t first, int64_t last, const void* packed_x, float* sums) const {
  const Storage type = problem.weight.type;
  const int64_t padded = padded_depth(problem.weight.depth, type);
  const int64_t units = padded_rows() / family.unit, blocks = (units + family.most_units - 1) / family.most_units;
  const int64_t visit = blocks <= 2 ? family.depth_block / 2 : family.depth_block;
  const int64_t sums_per_tile = padded_rows() * tile, side_by_side = group();
  const char* data = static_cast<const char*>(problem.weight.data);
  if (first >= last) return;
  family.enter();
  for (int64_t start = first; start < last; start += side_by_side) {
    const int64_t end = std::min(start + side_by_side, last);
    std::memset(sums, 0, (end - start) * sums_per_tile * 4);
    for (int64_t k = 0; k < padded; k += visit) {
      const int64_t count = std::min(visit, padded - k), steps = count / grain(type);
      const char* x = static_cast<const char*>(packed_x) + k / family.depth_block * padded_rows() * row_bytes() +
                      k % family.depth_block * family.x_entry;
      for (int64_t t = start; t < end; ++t) {
        const char* w = data + t * tile_offset(padded, type) + tile_offset(k, type);
        // The block that comes next: the next tile's at this depth, or the first tile's further down, or the next group's first.
        const char* next = t + 1 < end ? w + tile_offset(padded, type)
                           : k + count < padded
                               ? data + start * tile_offset(padded, type) + tile_offset(k + count, type)
                               : data + std::min(end, last - 1) * tile_offset(padded, type);
        for (int64_t b = 0; b < blocks; ++b) {
          const int64_t unit = share(units, b, blocks), num_units = share(units, b + 1, blocks) - unit;
          const char* rows_x = x + unit * family.unit * row_bytes();
          const int64_t lines = family.lines_per_step;
          // A lone block of rows streams through the weight; of several, the first ones share out the block that comes next, and all fetch
          // the rows that come next.
          const char* ahead = blocks == 1 ? w + near : next + std::min(b, lines - 1) * steps * 64;
          const Prefetch prefetch = blocks == 1 ? Prefetch{ahead, ahead + (lines - 1) * 64, w + far, (lines - 1) * 64, lines * 64}
                                                : Prefetch{ahead, rows_x + num_units * family.unit * row_bytes(), ahead + far, 0, 64};
          family.multiply[num_units - 1](rows_x, w, steps, sums + (t - start) * sums_per_tile + unit * family.unit * tile, prefetch);
        }
      }
    }
    for (int64_t t = start; t < end; ++t) family.finish(problem, t, first_row, rows, sums + (t - start) * sums_per_tile);
  }
  family.leave();
}

}  // namespace echelon::linear
