// Row-wise operations around the linear layers. Every one is computed in float32 with a fixed order of additions and rounded once, so a
// row's result depends on that row alone, and is the same bits on every processor (the build contracts no multiplications and additions).
#pragma once

#include <cstdint>

#include "../numbers.h"

namespace echelon {

// How a root-mean-square norm applies its weight w to the normalised row y (float32).
enum class RmsWeight {
  after_rounding,  // w · round(y)       Llama, Qwen, Mistral
  in_float32,      // round(w · y)       OLMo-2
  one_plus,        // round((1 + w) · y) Gemma
};

// A row of `size` values in memory.
struct Rows {
  const void* data;
  int64_t stride;  // between rows, in values
};

// out [rows, size] = x / sqrt(mean(x²) + eps), weighted.
void rms_norm(Storage type, Rows x, const void* weight, void* out, int64_t begin, int64_t end, int64_t size, float eps, RmsWeight how);

// out [rows, size] = (x − mean) / sqrt(variance + eps) · weight + bias; weight and bias may be null.
void layer_norm(Storage type, Rows x, const void* weight, const void* bias, void* out, int64_t begin, int64_t end, int64_t size, float eps);

// out [rows, size] = act(x), or act(x) · other where `other.data` is not null.
void activate(Storage type, Activation kind, Rows x, Rows other, void* out, int64_t begin, int64_t end, int64_t size);

// Rotary embedding (Su et al. 2021) of the first `rotary` values of each head by halves; the others are copied. x has strides in values;
// out is [tokens, heads, size]; cos and sin are [tokens, rotary], of the same type as x or float32.
void rotate(Storage type, Storage angle_type, const void* x, int64_t token_stride, int64_t head_stride, const void* cos, const void* sin, void* out, int64_t begin,
            int64_t end, int64_t heads, int64_t size, int64_t rotary);

// out [count] = a + b.
void add(Storage type, const void* a, const void* b, void* out, int64_t count);

// A layer's keys, or its values: [blocks, heads, block_size] of `bytes` each, numbers of a head or, rounded, its integers and their scale.
struct HeadSlots {
  void* data;
  int64_t heads, block_size, bytes;
  bool is_rounded = false;
};

// Rows begin … end − 1 of `from` [T, heads, size], with strides in values, go to their `slots` [T].
void write_slots(Storage type, const void* from, int64_t token_stride, int64_t head_stride, int64_t size, const int64_t* slots, int64_t begin,
                 int64_t end, HeadSlots to);

}  // namespace echelon
