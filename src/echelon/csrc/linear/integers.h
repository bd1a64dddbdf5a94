// Families that multiply the unsigned integers of a weight by the signed ones of x. Included inside a family's target section, after a
// description D of its registers:
//   Register of `width` lanes of int32; load(const void*), store(void*, Register), all(int32_t), add, bytes(const uint8_t*): a byte a lane
//   entry_bytes: of four entries of x, and Entry entry(const char* x), which puts them into every lane
//   Quads quads(Register): a weight's bytes, four entries to a lane; dot(sum, Quads, Entry): sum + their products with x's
//   halves: whether `narrow_dot` takes bytes below 16, up to eight times into lanes of int16, and widen(sum, narrow sum) adds these up
//   Floats; load_floats, store_floats, half_floats(const uint16_t*), and multiply_add(x, y, z) = round(x · y) + z; to_floats(Register)
//   most_rows of a block of registers, and at_once(rows): how many registers of columns go with them;
//   few_rows, which leave memory waiting: where the processor's own fetching ahead does better; fewer than the least of two blocks of rows
// No STL here.
#pragma once

#include "finish.h"

namespace echelon::linear {
namespace {

constexpr int64_t integer_depth = 256;  // 8 KiB of weight of 8 bits, of which two and x fit into L1

template <class D, int bits>
struct IntegerFamily {
  using Register = typename D::Register;
  static constexpr int64_t x_stride = integer_depth / 4 * D::entry_bytes + x_padding;
  static constexpr int64_t step_bytes = tile * 4;

  static inline ALWAYS_INLINE int32_t group_sum(const char* x, int64_t group) {
    int32_t sum;
    std::memcpy(&sum, x + integer_depth / 4 * D::entry_bytes + group * 4, 4);
    return sum;
  }

  template <int vectors>
  static inline ALWAYS_INLINE void fetch_for(Prefetch prefetch, int64_t step, int64_t c) {
    fetch(prefetch, step, c / (vectors * D::width), tile / (vectors * D::width));
  }

  // `rows` rows times `vectors` registers of columns from column c.
  template <int rows, int vectors>
  static inline ALWAYS_INLINE void bytes(const char* x, const char* w, int64_t steps, float* sums, int64_t c, Prefetch prefetch) {
    Register sum[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) sum[r][v] = D::load(sums + r * tile + c + v * D::width);
    for (int64_t s = 0; s < steps; ++s) {
      if constexpr (rows > D::few_rows) fetch_for<vectors>(prefetch, s, c);
      typename D::Quads column[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) column[v] = D::quads(D::load(w + s * step_bytes + (c + v * D::width) * 4));
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const auto entry = D::entry(x + r * x_stride + s * D::entry_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[r][v] = D::dot(sum[r][v], column[v], entry);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) D::store(sums + r * tile + c + v * D::width, sum[r][v]);
  }

  // 32 entries of a group of halves of bytes: four steps of eight.
  template <int rows, int vectors, class Dot>
  static inline ALWAYS_INLINE void halves_of(const char* x, const char* w, Register (&sum)[rows][vectors], int64_t c, const Dot& dot) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      Register low[vectors], high[vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const Register both = D::load(w + s * step_bytes + (c + v * D::width) * 4);
        low[v] = D::low(both), high[v] = D::high(both);
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const auto first_four = D::entry(x + r * x_stride + 2 * s * D::entry_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[r][v] = dot(sum[r][v], low[v], first_four);
        const auto other_four = D::entry(x + r * x_stride + (2 * s + 1) * D::entry_bytes);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) sum[r][v] = dot(sum[r][v], high[v], other_four);
      }
    }
  }

  // Calls f(r, v) for every sum.
  template <int rows, int vectors, class F>
  static inline ALWAYS_INLINE void each(const F& f) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) f(r, v);
  }

  template <int rows, int vectors>
  static inline ALWAYS_INLINE void halves(const char* x, const char* w, int64_t steps, float* sums, int64_t c, Prefetch prefetch,
                                          Integers integers) {
    const int64_t group_steps = integers.group / 8;
    typename D::Floats total[rows][vectors];
    each<rows, vectors>([&](int r, int v) ALWAYS_INLINE { total[r][v] = D::load_floats(sums + r * tile + c + v * D::width); });
    for (int64_t g = 0; g * group_steps < steps; ++g) {
      const char* data = w + tile * (integers.has_zeros ? 3 : 2);
      const char* group_x = x + g * group_steps * 2 * D::entry_bytes;
      Register sum[rows][vectors];
      if (integers.has_zeros) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
          const Register zero = D::bytes(reinterpret_cast<const uint8_t*>(w) + 2 * tile + c + v * D::width);
#pragma GCC unroll 16
          for (int r = 0; r < rows; ++r) sum[r][v] = D::multiply_low(zero, D::all(group_sum(x + r * x_stride, g)));
        }
      } else {
        each<rows, vectors>([&](int r, int v) ALWAYS_INLINE { sum[r][v] = D::all(group_sum(x + r * x_stride, g)); });
      }
      for (int64_t s = 0; s < group_steps; s += 4) {
        const char* part_x = group_x + 2 * s * D::entry_bytes;
        const char* part_w = data + s * step_bytes;
        if constexpr (rows > D::few_rows)
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) fetch_for<vectors>(prefetch, g * group_steps + s + i, c);
        if constexpr (D::narrow) {
          Register part[rows][vectors];
          each<rows, vectors>([&](int r, int v) ALWAYS_INLINE { part[r][v] = D::all(0); });
          halves_of(part_x, part_w, part, c, [](auto s, auto w, auto e) ALWAYS_INLINE { return D::narrow_dot(s, w, e); });
          each<rows, vectors>([&](int r, int v) ALWAYS_INLINE { sum[r][v] = D::widen(sum[r][v], part[r][v]); });
        } else {
          halves_of(part_x, part_w, sum, c, [](auto s, auto w, auto e) ALWAYS_INLINE { return D::dot(s, D::quads(w), e); });
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) {
        const auto scale = D::half_floats(reinterpret_cast<const uint16_t*>(w) + c + v * D::width);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) total[r][v] = D::multiply_add(D::to_floats(sum[r][v]), scale, total[r][v]);
      }
      w = data + group_steps * step_bytes;
    }
    each<rows, vectors>([&](int r, int v) ALWAYS_INLINE { D::store_floats(sums + r * tile + c + v * D::width, total[r][v]); });
  }

  template <int rows>
  static void multiply(const void* x, const void* w, int64_t steps, float* sums, Prefetch prefetch, Integers integers) {
    const char *from = static_cast<const char*>(x), *weight = static_cast<const char*>(w);
    constexpr int at_once = D::at_once(rows);
    for (int64_t c = 0; c < tile; c += at_once * D::width) {
      if constexpr (bits == 8)
        bytes<rows, at_once>(from, weight, steps, sums, c, prefetch);
      else
        halves<rows, at_once>(from, weight, steps, sums, c, prefetch, integers);
    }
  }

  // Four entries as they are, or widened to int16, first and third before second and fourth.
  static void pack_x(const void* x, int64_t count, void* packed) {
    const int8_t* from = static_cast<const int8_t*>(x);
    if constexpr (D::entry_bytes == 4) {
      std::memcpy(packed, from, count);
      std::memset(static_cast<char*>(packed) + count, 0, integer_depth - count);
    } else {
      int16_t* to = static_cast<int16_t*>(packed);
      for (int64_t k = 0; k < count; ++k) to[k / 4 * 4 + k % 2 * 2 + k / 2 % 2] = from[k];
      for (int64_t k = count; k < integer_depth; ++k) to[k / 4 * 4 + k % 2 * 2 + k / 2 % 2] = 0;
    }
  }

  template <int n, int... rest>
  struct Count : Count<n - 1, n, rest...> {};
  template <int... n>
  struct Count<0, n...> {
    static constexpr Family family{D::name, 1, D::most_rows, integer_depth, integer_depth, D::entry_bytes / 4, 2,
                                   pack_x, {multiply<n>...}, finish<bits>, nothing, nothing, 0, bits == 4};
  };
  static constexpr const Family& family = Count<D::most_rows>::family;
};

}  // namespace
}  // namespace echelon::linear
