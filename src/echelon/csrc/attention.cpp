// Attention in float32 arithmetic for every storage and processor, and the choice of what serves.
#include <vector>

#include "attention_tiles.h"
#include "isa.h"

namespace echelon {
namespace {

// Entries are float32 numbers, one a key or value.
template <Storage type>
struct FloatMath {
  using Stored = typename Number<type>::Stored;
  static constexpr int64_t grain = 1, bytes = sizeof(Stored);

  METHOD static F16 broadcast(const float* p) { return F16{} + *p; }
  METHOD static F16 multiply_add(F16 a, F16 b, F16 c) { return c + a * b; }
  METHOD static F16 round_weights(F16 weights) { return weights; }
  METHOD static void pack_weights(float*) {}

  METHOD static void copy_row(const char* from, int64_t size, int64_t width, float* to) {
    const auto* in = reinterpret_cast<const Stored*>(from);
    for (int64_t i = 0; i < size; ++i) to[i] = Number<type>::widen(in[i]);
    for (int64_t i = size; i < width; ++i) to[i] = 0.0f;
  }
  METHOD static const float* row(const char* from, int64_t size, int64_t width, float* staged) {
    copy_row(from, size, width, staged);
    return staged;
  }
  METHOD static void entries(const char* const* rows, int64_t offset, F16* to) {
    float columns[value_columns];
    copy_row(rows[0] + offset, value_columns, value_columns, columns);
    for (int64_t i = 0; i < value_columns / lanes; ++i) to[i] = load(columns + i * lanes);
  }
  METHOD static void interleave(const char* const* rows, int64_t size, float* to) {
    if (rows[0])
      copy_row(rows[0], size, padded(size), to);
    else
      zero(to, padded(size));
  }
  METHOD static bool are_finite(const float* values, int64_t count) {
    float sum = 0.0f;  // x − x is 0, or NaN
    for (int64_t i = 0; i < count; ++i) sum += values[i] - values[i];
    return sum == 0.0f;
  }
  METHOD static void write_row(const float* sums, float total, int64_t size, char* to) {
    auto* out = reinterpret_cast<Stored*>(to);
    for (int64_t i = 0; i < size; ++i) out[i] = Number<type>::narrow(sums[i] / total);
  }
};

#define FOR_STORAGE(name, type)                                                                              \
  FOR_EVERY_PROCESSOR void attend_##name(const AttentionCall& call, const AttentionUnit& unit, float* m) {   \
    Unit<FloatMath<type>>(call, unit, m).attend();                                                           \
  }                                                                                                          \
  FOR_EVERY_PROCESSOR void combine_##name(const AttentionCall& call, const AttentionUnit& unit, int64_t count, float* m) { \
    Unit<FloatMath<type>>(call, unit, m).combine(count);                                                     \
  }
FOR_STORAGE(float32, Storage::float32)
FOR_STORAGE(bfloat16, Storage::bfloat16)
FOR_STORAGE(float16, Storage::float16)

// Enough floats for any arithmetic; one a thread, kept.
float* memory_of(const AttentionCall& call, const AttentionUnit& unit) {
  thread_local std::vector<float> memory;
  const int64_t heads = unit.head_end - unit.head_begin, pairs = (unit.token_end - unit.token_begin) * (call.num_heads / call.num_kv_heads);
  const int64_t steps = padded(call.key_size), width = padded(call.value_size), places = heads * pairs;
  const int64_t size = places * steps + key_tile * (most(steps, width) + steps + width + pairs + places) + 2 * padded(Sums::size(places, width)) + lanes;
  if (memory.size() < static_cast<size_t>(size)) memory.resize(static_cast<size_t>(size));
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

bool has_bfloat16_products(const AttentionCall& call) { return call.type == Storage::bfloat16 && active_isa() >= Isa::avx512_bf16; }

}  // namespace

void attend(const AttentionCall& call, const AttentionUnit& unit) {
  float* m = memory_of(call, unit);
  if (has_bfloat16_products(call)) return attend_avx512_bf16(call, unit, m);
  if (call.type == Storage::float32) return attend_float32(call, unit, m);
  if (call.type == Storage::bfloat16) return attend_bfloat16(call, unit, m);
  attend_float16(call, unit, m);
}

int64_t partial_size(const AttentionCall& call, const AttentionUnit& unit) {
  const int64_t heads = (unit.head_end - unit.head_begin) * (call.num_heads / call.num_kv_heads);
  return Sums::size((unit.token_end - unit.token_begin) * heads, padded(call.value_size));
}

void combine(const AttentionCall& call, const AttentionUnit& unit, int64_t count) {
  float* m = memory_of(call, unit);
  if (has_bfloat16_products(call)) return combine_avx512_bf16(call, unit, count, m);
  if (call.type == Storage::float32) return combine_float32(call, unit, count, m);
  if (call.type == Storage::bfloat16) return combine_bfloat16(call, unit, count, m);
  combine_float16(call, unit, count, m);
}

}  // namespace echelon
