// Families that multiply in float32, whatever the weight's type. Included inside a family's target section, after a `Vector`:
//   Register, width, load(const float*), store(float*, Register), broadcast(const float*), fma(a, b, c) = a · b + c,
//   f16(const uint16_t*), even(const uint16_t*) and odd(const uint16_t*): the first and second halves of pairs of bfloat16,
//   most_rows and most_sums of a block of registers, and short_block as in Family.
// x is packed as float32 [depth_block] a row. No STL here.
#pragma once

#include "finish.h"

namespace echelon::linear {
namespace {

template <Storage type>
struct Fma {
  static constexpr int64_t depth_block = type == Storage::float32 ? 128 : 256;  // 16 KiB of weight; halves, of which two and x fit into L1, for few rows
  static constexpr int64_t grain = type == Storage::bfloat16 ? 2 : 1;
  static constexpr int64_t x_stride = depth_block + x_padding / 4;
  static constexpr int64_t lines_per_step = type == Storage::float16 ? 1 : 2;
  static constexpr int64_t few_rows = 4 * lines_per_step * Vector::width / (tile * grain);  // four multiplications for a line

  // `width` columns from column c of step s; `part` is 0, or 1 for the second entry of a pair.
  static inline __attribute__((always_inline)) Vector::Register weight(const void* w, int64_t s, int64_t c, int64_t part) {
    if constexpr (type == Storage::float32) return Vector::load(static_cast<const float*>(w) + s * tile + c);
    const uint16_t* at = static_cast<const uint16_t*>(w) + (s * tile + c) * grain;
    if constexpr (type == Storage::float16) return Vector::f16(at);
    return part == 0 ? Vector::even(at) : Vector::odd(at);
  }

  // `rows` rows times `vectors` registers of columns from column c.
  template <int rows, int vectors>
  static inline __attribute__((always_inline)) void block(const float* x, const void* w, int64_t steps, float* sums, int64_t c,
                                                          Prefetch prefetch) {
    typename Vector::Register sum[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = Vector::load(sums + r * tile + c + v * Vector::width);
    for (int64_t s = 0; s < steps; ++s) {
      if constexpr (rows > few_rows)
        fetch(prefetch, s, c / (vectors * Vector::width), tile / (vectors * Vector::width));
#pragma GCC unroll 2
      for (int part = 0; part < grain; ++part) {
        // The fewer of entries and columns are kept, the others come one by one: three rows of four registers fill sixteen.
        if constexpr (rows < vectors) {
          typename Vector::Register entry[rows];
#pragma GCC unroll 16
          for (int r = 0; r < rows; ++r) entry[r] = Vector::broadcast(x + r * x_stride + s * grain + part);
#pragma GCC unroll 8
          for (int v = 0; v < vectors; ++v) {
            const auto column = weight(w, s, c + v * Vector::width, part);
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) sum[r][v] = Vector::fma(entry[r], column, sum[r][v]);
          }
        } else {
          typename Vector::Register column[vectors];
#pragma GCC unroll 8
          for (int v = 0; v < vectors; ++v) column[v] = weight(w, s, c + v * Vector::width, part);
#pragma GCC unroll 16
          for (int r = 0; r < rows; ++r) {
            const auto entry = Vector::broadcast(x + r * x_stride + s * grain + part);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) sum[r][v] = Vector::fma(entry, column[v], sum[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) Vector::store(sums + r * tile + c + v * Vector::width, sum[r][v]);
  }

  // Few rows take the tile in one go, so that it is read once; more rows in halves, where registers are short.
  template <int rows>
  static void multiply(const void* x, const void* w, int64_t steps, float* sums, Prefetch prefetch, Integers) {
    constexpr int vectors = tile / Vector::width;
    constexpr int at_once = rows * vectors <= Vector::most_sums ? vectors : Vector::most_sums / rows >= vectors / 2 ? vectors / 2 : vectors / 4;
    for (int64_t c = 0; c < tile; c += at_once * Vector::width)
      block<rows, at_once>(static_cast<const float*>(x), w, steps, sums, c, prefetch);
  }

  static void pack_x(const void* x, int64_t count, void* packed) {
    float* out = static_cast<float*>(packed);
    if constexpr (type == Storage::float32) {
      std::memcpy(out, x, count * 4);
    } else {
      const uint16_t* from = static_cast<const uint16_t*>(x);
      for (int64_t i = 0; i < count; ++i) out[i] = to_float(from[i], type);
    }
    std::memset(out + count, 0, (depth_block - count) * 4);
  }

  template <int n, int... rest>
  struct Count : Count<n - 1, n, rest...> {};
  template <int... n>
  struct Count<0, n...> {
    static constexpr Family family{Vector::name, 1, Vector::most_rows, depth_block, depth_block / 2, 4, lines_per_step,
                                   pack_x, {multiply<n>...}, finish<0>, nothing, nothing, Vector::short_block};
  };
  static constexpr const Family& family = Count<Vector::most_rows>::family;
};

const Family& fma_family(Storage type) {
  return type == Storage::float32 ? Fma<Storage::float32>::family : type == Storage::float16 ? Fma<Storage::float16>::family : Fma<Storage::bfloat16>::family;
}

}  // namespace
}  // namespace echelon::linear
