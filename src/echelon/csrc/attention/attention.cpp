// What attention needs of memory, and the choice of what serves.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "../isa.h"

namespace echelon {
namespace {

// (head, token) pairs, each with a softmax of its own.
int64_t num_states_of(const AttentionCall& call, const AttentionUnit& unit) {
  return (unit.token_end - unit.token_begin) * (unit.head_end - unit.head_begin) * (call.num_heads / call.num_kv_heads);
}

// Enough floats for any arithmetic; one a thread, kept.
float* memory_of(const AttentionCall& call, const AttentionUnit& unit) {
  thread_local std::vector<float> memory;
  const int64_t states = num_states_of(call, unit), pairs = states / (unit.head_end - unit.head_begin);
  const int64_t steps = whole_lanes(call.key_size), width = whole_lanes(call.value_size);
  const int64_t tiles = key_tile * (std::max(steps, width) + steps + width + pairs + states);
  const int64_t quads = pairs <= most_few_pairs ? states * steps * 4 : 0;
  const auto size = static_cast<size_t>((states + 1) * steps + quads + tiles + 2 * whole_lanes(partial_size(call, unit)) + attention_lanes);
  if (memory.size() < size) memory.resize(size);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return memory.data() + (64 - address % 64) % 64 / sizeof(float);
}

const AttentionFamily& family(const AttentionCall& call) {
  const Features features = active_features();
  if (call.type == Storage::bfloat16 && !call.is_rounded && has(features, avx512 | avx512_bf16)) return avx512_bf16_attention;
  if (has(features, avx512)) return avx512_attention;
  return has(features, avx2) ? avx2_attention : generic_attention;
}

}  // namespace

int64_t partial_size(const AttentionCall& call, const AttentionUnit& unit) {
  return num_states_of(call, unit) * (whole_lanes(call.value_size) + attention_lanes + 1);
}

void attend(const AttentionCall& call, const AttentionUnit& unit) { family(call).attend(call, unit, memory_of(call, unit)); }

void combine(const AttentionCall& call, const AttentionUnit& unit, int64_t count) {
  family(call).combine(call, unit, count, memory_of(call, unit));
}

}  // namespace echelon
