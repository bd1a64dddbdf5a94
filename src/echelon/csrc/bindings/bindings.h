// What each file of bindings adds to the library of operations, and how they read tensors.
#pragma once

#include "../attention/attention.h"
#include "../elementwise/elementwise.h"
#include "../linear/linear.h"
#include "tensors.h"

namespace echelon {

inline Storage storage_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return Storage::float32;
  if (dtype == ScalarType::BFloat16) return Storage::bfloat16;
  CHECK(dtype == ScalarType::Half, "dtype ", dtype, " is not served; use float32, bfloat16 or float16");
  return Storage::float16;
}

inline Activation activation_of(int64_t number) {
  CHECK(number >= 0 && number <= static_cast<int64_t>(Activation::gelu_tanh), "unknown activation ", number);
  return static_cast<Activation>(number);
}

// What the entries of a weight are; bits 0: numbers.
struct IntegerArguments {
  int64_t bits = 0, group = 0;  // entries of a group
  bool has_zeros = false;       // whether groups have zeros of their own
};

// Checked views of tensors, as several operations take them. `type` is that of x.
linear::Weight weight_of(const Tensor& packed, int64_t columns, int64_t depth, ScalarType type, IntegerArguments integers);
const float* bias_of(const std::optional<Tensor>& bias, int64_t columns);  // null where there is none

// A layer's keys or values [blocks, heads, block_size, size], or int8 with `scale_bytes` more where they are rounded.
bool is_rounded(const Tensor& cache);
int64_t numbers_of(const Tensor& cache);  // of a head
HeadSlots slots_of(const Tensor& cache);
void check_slots(const Tensor& slots, const Tensor& keys, const Tensor& values);

// Where new tokens and their keys lie: positions [T], indptr [B+1], block_table [B, M], text_lens [B], and in trees parents [P] and
// node_indptr [B+1], all int32.
struct Places {
  const Tensor &positions, &indptr, &block_table, &text_lens;
  const std::optional<Tensor>&parents, &node_indptr;
};

// A call of attention without its query and out, which are of `type`, after checks.
AttentionCall attention_of(const Places& places, ScalarType type, const Tensor& keys, const Tensor& values, int64_t num_heads,
                           double scale, std::optional<int64_t> window, std::optional<double> softcap);

// Memory that a calling thread keeps between calls, aligned to a large page.
char* scratch(int64_t bytes);

// Float32 and whole, as sinks of attention are read.
inline std::optional<Tensor> float32_of(const std::optional<Tensor>& x) {
  if (!x) return std::nullopt;
  return whole(x->scalar_type() == ScalarType::Float ? *x : torch::stable::to(*x, ScalarType::Float));
}

using Library = torch::stable::detail::StableLibrary;

void define_attention(Library& library);
void define_baseline(Library& library);
void define_elementwise(Library& library);
void define_layer(Library& library);
void define_linear(Library& library);
void define_rank(Library& library);
void define_sample(Library& library);

}  // namespace echelon
