// Attention in float32 arithmetic for every storage: for files that compile it for one family of processors or another.
#pragma once

#include "tiles.h"

namespace echelon {
namespace {

// Entries are float32 numbers, one a key or value. Rounded ones are their integer times their scale, as float32.
template <Storage type, bool is_rounded>
struct FloatMath {
  using Stored = typename Number<type>::Stored;
  static constexpr int64_t grain = 1, bytes = sizeof(Stored);
  static constexpr bool reads_in_place = !is_rounded;

  INLINE_METHOD static int64_t slot_bytes(int64_t size) { return is_rounded ? size + scale_bytes : size * bytes; }

  INLINE_METHOD static Register broadcast(const float* p) { return splat(*p); }
  INLINE_METHOD static Register multiply_add(Register a, Register b, Register c) { return fma(a, b, c); }
  INLINE_METHOD static Lanes round_weights(const Lanes& weights) { return weights; }
  INLINE_METHOD static void pack_weights(float*, int64_t) {}

  INLINE_METHOD static Register widen(const float* p) { return load_register(p); }
  INLINE_METHOD static Register widen(const uint16_t* p) {
    return (Register)(__builtin_convertvector(load_as<Halves>(p), Words) << 16);
  }
  INLINE_METHOD static void copy_row(const char* from, int64_t size, int64_t width, float* to) {
    const auto* in = reinterpret_cast<const Stored*>(from);
    int64_t i = 0;
    if constexpr (type != Storage::float16)
      for (; i + register_lanes <= size; i += register_lanes) store(to + i, widen(in + i));
    for (; i < size; ++i) to[i] = Number<type>::widen(in[i]);
    for (int64_t i = size; i < width; ++i) to[i] = 0.0f;
  }
  // A key or value of the cache.
  INLINE_METHOD static void copy_slot(const char* from, int64_t size, int64_t width, float* to) {
    if constexpr (!is_rounded) return copy_row(from, size, width, to);
    const float scale = load_as<float>(from + size);
    int64_t i = 0;
    for (; i + register_lanes <= size; i += register_lanes)
      store(to + i, __builtin_convertvector(__builtin_convertvector(load_as<Octets>(from + i), Integers), Register) * splat(scale));
    for (; i < size; ++i) to[i] = static_cast<float>(static_cast<int8_t>(from[i])) * scale;
    for (; i < width; ++i) to[i] = 0.0f;
  }
  INLINE_METHOD static const float* row(const char* from, int64_t size, int64_t width, float* staged) {
    copy_slot(from, size, width, staged);
    return staged;
  }
  INLINE_METHOD static void entries(const char* const* rows, int64_t offset, Register* to) {
    float columns[value_columns];
    copy_row(rows[0] + offset, value_columns, value_columns, columns);
    for (int64_t i = 0; i < value_columns / register_lanes; ++i) to[i] = load_register(columns + i * register_lanes);
  }
  INLINE_METHOD static void interleave(const char* const* rows, int64_t size, float* to) {
    if (rows[0])
      copy_slot(rows[0], size, whole_lanes(size), to);
    else
      zero(to, whole_lanes(size));
  }
  INLINE_METHOD static bool are_finite(const float* values, int64_t count) {
    Integers special{};
    for (int64_t i = 0; i < count; i += register_lanes) {
      const Register value = load_register(values + i);
      special |= value - value != Register{};  // x − x is 0, or NaN
    }
    int32_t any = 0;
    for (int lane = 0; lane < register_lanes; ++lane) any |= special[lane];
    return any == 0;
  }
  INLINE_METHOD static void write_row(const float* sums, float total, int64_t size, char* to) {
    auto* out = reinterpret_cast<Stored*>(to);
    for (int64_t i = 0; i < size; ++i) out[i] = Number<type>::narrow(sums[i] / total);
  }
};

template <bool is_rounded, class Do>
void with_type(const AttentionCall& call, const Do& work) {
  if (call.type == Storage::float32)
    work(FloatMath<Storage::float32, is_rounded>{});
  else if (call.type == Storage::bfloat16)
    work(FloatMath<Storage::bfloat16, is_rounded>{});
  else
    work(FloatMath<Storage::float16, is_rounded>{});
}
template <class Do>
void with_storage(const AttentionCall& call, const Do& work) {
  call.is_rounded ? with_type<true>(call, work) : with_type<false>(call, work);
}

void attend_float(const AttentionCall& call, const AttentionUnit& unit, float* memory) {
  with_storage(call, [&]<class Math>(Math) { Unit<Math>(call, unit, memory).attend(); });
}
void combine_float(const AttentionCall& call, const AttentionUnit& unit, int64_t count, float* memory) {
  with_storage(call, [&]<class Math>(Math) { Unit<Math>(call, unit, memory).combine(count); });
}

}  // namespace
}  // namespace echelon
