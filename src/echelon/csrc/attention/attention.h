// Causal attention of packed new tokens over cached keys and values. `ops/reference.py` is the definition.
#pragma once

#include <cstdint>

#include "../numbers.h"

namespace echelon {

// Shapes as in `ops.ragged_attention`: query and out [T, H, D or Dv], keys and values [blocks, Hkv, block_size, D or Dv]. A head is
// contiguous; strides count values. window 0: none; softcap 0: none; sinks null: none; parents null: every row is a chain. Keys and values
// that are rounded are integers of 8 bits, and behind each head's lies the float32 that they are multiplied by (`scale_bytes`).
struct AttentionCall {
  Storage type;  // of query and out, and of keys and values that are not rounded
  const void *query, *keys, *values;
  void* out;
  int64_t query_token_stride, query_head_stride;
  int64_t num_rows, num_heads, num_kv_heads, key_size, value_size, block_size, table_stride;
  const int32_t *positions, *indptr, *block_table;
  // A row's drafted nodes, cached before or new: node j is the row's entry text_lens[row] + j, and its parent is node
  // parents[node_indptr[row] + j], −1 the last known token; [B + 1], [B].
  const int32_t *parents, *node_indptr, *text_lens;
  float scale, softcap;
  int64_t window;
  const float* sinks;  // [H]
  bool is_rounded = false;
  float* partials = nullptr;  // where units of one section leave what came of them
};

// Some new tokens of one row for some key/value heads and the keys of positions `key_begin` to `key_end` − 1: what one thread does at a
// time. `partial` −1: all keys, and the result is written. Else these are the keys of one section, and what came of them is left
// in the call's partials from there on [partial_size] for `combine`.
struct AttentionUnit {
  int64_t row, token_begin, token_end, head_begin, head_end, key_begin, key_end, partial;
};

constexpr int64_t query_block = 64;   // (token, head of the group) pairs that share one pass over the keys
constexpr int64_t key_tile = 64;      // tiles lie at multiples of this from position 0
constexpr int64_t key_section = 512;  // sums over sections, also at multiples from position 0, are added up in order

constexpr int64_t attention_lanes = 16;  // sums run in so many lanes, and rows in memory are filled up to them
inline int64_t whole_lanes(int64_t n) { return (n + attention_lanes - 1) / attention_lanes * attention_lanes; }

constexpr int64_t most_few_pairs = 8;  // of (token, query head): up to so many, keys and values may be multiplied as they lie
constexpr int64_t largest_head = 1024;  // numbers in a key or value; any size from 1 on is served

// How many tokens of one row a unit holds.
inline int64_t tokens_per_unit(const AttentionCall& call) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  return group >= query_block ? 1 : query_block / group;
}

void attend(const AttentionCall& call, const AttentionUnit& unit);

// Floats that a unit leaves in `partial`.
int64_t partial_size(const AttentionCall& call, const AttentionUnit& unit);

// Add up `count` sections that `attend` left one after another from `unit.partial` on, and write the result.
void combine(const AttentionCall& call, const AttentionUnit& unit, int64_t count);

// The same for one family of processors, in memory that has been found for it.
struct AttentionFamily {
  void (*attend)(const AttentionCall& call, const AttentionUnit& unit, float* memory);
  void (*combine)(const AttentionCall& call, const AttentionUnit& unit, int64_t count, float* memory);
};
extern const AttentionFamily generic_attention, avx2_attention, avx512_attention, avx512_bf16_attention;

}  // namespace echelon
