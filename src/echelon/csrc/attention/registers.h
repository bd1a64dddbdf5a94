// Vectors of 16 logical lanes in registers of the family's own width, so that no family works by another's shuffles. Included inside a
// family's target section, with REGISTER_LANES 16, 8 or 4. Sums run in the same 16 lanes whatever the width, and a multiply-add is fused
// where the family can fuse it, by name and never by the compiler's choice: families that fuse give the same bits.
#pragma once

#if REGISTER_LANES > 4
#include <immintrin.h>
#endif

#include <cstring>
#include <utility>

#include "attention.h"


namespace echelon {
namespace {

constexpr int64_t lanes = attention_lanes;
constexpr int64_t register_lanes = REGISTER_LANES;
constexpr int num_parts = lanes / register_lanes;

using Register = float __attribute__((vector_size(4 * REGISTER_LANES)));
using Words = uint32_t __attribute__((vector_size(4 * REGISTER_LANES)));
using Integers = int32_t __attribute__((vector_size(4 * REGISTER_LANES)));
using Halves = uint16_t __attribute__((vector_size(2 * REGISTER_LANES)));
using Octets = int8_t __attribute__((vector_size(REGISTER_LANES)));

INLINE Register fma(Register a, Register b, Register c) {
#if REGISTER_LANES == 16
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif REGISTER_LANES == 8
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <class Value>
INLINE Value load_as(const void* p) {
  Value v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
INLINE Register load_register(const void* p) { return load_as<Register>(p); }
INLINE void store(float* p, Register v) { std::memcpy(p, &v, sizeof v); }
INLINE Register splat(float x) {  // a load that fills a register: an addition to zeros would be kept, for the sake of −0
#if REGISTER_LANES == 16
  return (Register)_mm512_set1_ps(x);
#elif REGISTER_LANES == 8
  return (Register)_mm256_set1_ps(x);
#else
  return Register{x, x, x, x};
#endif
}

// 16 floats.
struct Lanes {
  Register part[num_parts];
};

// A register at a time, for a copy of all would be read before it has been written.
INLINE Lanes load(const float* p) {
  Lanes v;
#pragma GCC unroll 4
  for (int i = 0; i < num_parts; ++i) v.part[i] = load_register(p + i * register_lanes);
  return v;
}
INLINE void store(float* p, const Lanes& v) {
#pragma GCC unroll 4
  for (int i = 0; i < num_parts; ++i) store(p + i * register_lanes, v.part[i]);
}

constexpr int chains = 4;  // of a product's sum: entries of keys are taken four at a time

// Entries at … at + 3 of rows 0, 4, 8 and 12.
INLINE Lanes quads_of_rows(const float* const* rows, int64_t at) {
#if REGISTER_LANES == 16
  const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + at)), _mm_loadu_ps(rows[4] + at), 1);
  const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[8] + at)), _mm_loadu_ps(rows[12] + at), 1);
  return {{(Register)_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)}};
#else
  float quads[lanes];
  for (int i = 0; i < chains; ++i) std::memcpy(quads + i * chains, rows[i * chains] + at, sizeof(float) * chains);
  return load(quads);
#endif
}
// Four entries, four times.
INLINE Lanes same_quads(const float* from) {
#if REGISTER_LANES == 16
  return {{(Register)_mm512_broadcast_f32x4(_mm_loadu_ps(from))}};
#else
  const float* const rows[] = {from, nullptr, nullptr, nullptr, from, nullptr, nullptr, nullptr, from, nullptr, nullptr, nullptr, from};
  return quads_of_rows(rows, 0);
#endif
}

// Part by part.
template <class Do, class... Operands>
INLINE Lanes by_parts(const Do& work, const Operands&... operands) {
  Lanes out;
#pragma GCC unroll 4
  for (int i = 0; i < num_parts; ++i) out.part[i] = work(operands.part[i]...);
  return out;
}

INLINE Lanes all_lanes(float x) {
  Lanes out;
#pragma GCC unroll 4
  for (int i = 0; i < num_parts; ++i) out.part[i] = splat(x);
  return out;
}
INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
  return by_parts([](Register x, Register y) ALWAYS_INLINE { return x + y; }, a, b);
}
INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
  return by_parts([](Register x, Register y) ALWAYS_INLINE { return x - y; }, a, b);
}
INLINE Lanes operator*(const Lanes& a, const Lanes& b) {
  return by_parts([](Register x, Register y) ALWAYS_INLINE { return x * y; }, a, b);
}
INLINE Lanes largest(const Lanes& a, const Lanes& b) {
  return by_parts([](Register x, Register y) ALWAYS_INLINE { return x > y ? x : y; }, a, b);
}
// `other` in lanes where v equals x.
INLINE Lanes replace(const Lanes& v, float x, const Lanes& where, const Lanes& other) {
  return by_parts([x](Register a, Register b, Register c) ALWAYS_INLINE { return b == splat(x) ? c : a; }, v, where, other);
}

// Lanes of two vectors without and with bit `h`, those of the second where the first's others were.
template <int h>
INLINE void exchange(Register& a, Register& b) {
  Words low, high;
  for (uint32_t lane = 0; lane < register_lanes; ++lane) {
    low[lane] = lane & h ? register_lanes + lane - h : lane;
    high[lane] = lane & h ? register_lanes + lane : lane + h;
  }
  const Register first = a;
  a = __builtin_shuffle(first, b, low);
  b = __builtin_shuffle(first, b, high);
}
template <int h>
INLINE void exchange(Lanes& a, Lanes& b) {
#pragma GCC unroll 4
  for (int i = 0; i < num_parts; ++i)
    if constexpr (h < register_lanes)
      exchange<h>(a.part[i], b.part[i]);
    else if (constexpr int bit = h / register_lanes; !(i & bit))
      std::swap(a.part[i | bit], b.part[i]);
}

// Exchange lanes that differ in bit `h` between registers that differ in bit `h`.
template <int h>
INLINE void exchange_all(Register* v) {
#pragma GCC unroll 16
  for (int i = 0; i < register_lanes; ++i)
    if (!(i & h)) exchange<h>(v[i], v[i + h]);
}

// eˣ for x ≤ 0; the scalar function's series.
INLINE Register exponentials(Register x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const Register n = fma(x, splat(1.44269504f), splat(12582912.0f)) - 12582912.0f;  // the sum rounds to an integer
  const Register r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Register y = fma(r, splat(1.0f / 5040.0f), splat(1.0f / 720.0f));
  y = fma(y, r, splat(1.0f / 120.0f));
  y = fma(y, r, splat(1.0f / 24.0f));
  y = fma(y, r, splat(1.0f / 6.0f));
  y = fma(y, r, splat(0.5f));
  y = fma(y, r, splat(1.0f));
  y = fma(y, r, splat(1.0f));
  return y * (Register)((__builtin_convertvector(n, Integers) + 127) << 23);
}
INLINE Lanes exponentials(const Lanes& x) {
  return by_parts([](Register v) ALWAYS_INLINE { return exponentials(v); }, x);
}

template <int h>
INLINE Register largest_across(Register v) {
  Register other = v;
  exchange<h>(v, other);
  return v > other ? v : other;
}
// The largest lane.
INLINE float largest_of(const Lanes& v) {
  Register all = v.part[0];
#pragma GCC unroll 4
  for (int i = 1; i < num_parts; ++i) all = all > v.part[i] ? all : v.part[i];
  if constexpr (register_lanes > 8) all = largest_across<8>(all);
  if constexpr (register_lanes > 4) all = largest_across<4>(all);
  return largest_across<1>(largest_across<2>(all))[0];
}

}  // namespace
}  // namespace echelon
