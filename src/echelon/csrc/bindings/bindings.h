// What each file of bindings adds to the module, and how they read tensors.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>

#include "../attention/attention.h"
#include "../elementwise/elementwise.h"
#include "../linear/linear.h"

namespace echelon {

inline Storage storage_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return Storage::float32;
  if (dtype == at::kBFloat16) return Storage::bfloat16;
  TORCH_CHECK(dtype == at::kHalf, "dtype ", dtype, " is not served; use float32, bfloat16 or float16");
  return Storage::float16;
}

inline Activation activation_of(int64_t number) {
  TORCH_CHECK(number >= 0 && number <= static_cast<int64_t>(Activation::gelu_tanh), "unknown activation ", number);
  return static_cast<Activation>(number);
}

// bits, entries of a group, whether groups have zeros of their own; bits 0: a weight of numbers
using IntegerArguments = std::tuple<int64_t, int64_t, bool>;

// Checked views of tensors, as several operations take them. `type` is that of x.
linear::Weight weight_of(const at::Tensor& packed, int64_t columns, int64_t depth, at::ScalarType type, const IntegerArguments& integers);
const float* bias_of(const std::optional<at::Tensor>& bias, int64_t columns);  // null where there is none

// A layer's keys or values [blocks, heads, block_size, size], or int8 with `scale_bytes` more where they are rounded.
bool is_rounded(const at::Tensor& cache);
int64_t numbers_of(const at::Tensor& cache);  // of a head
HeadSlots slots_of(const at::Tensor& cache);
void check_slots(const at::Tensor& slots, const at::Tensor& keys, const at::Tensor& values);

// Where new tokens and their keys lie: positions [T], indptr [B+1], block_table [B, M], text_lens [B], and in trees parents [P] and
// node_indptr [B+1], all int32.
struct Places {
  const at::Tensor &positions, &indptr, &block_table, &text_lens;
  const std::optional<at::Tensor>&parents, &node_indptr;
};

// A call of attention without its query and out, which are of `type`, after checks.
AttentionCall attention_of(const Places& places, at::ScalarType type, const at::Tensor& keys, const at::Tensor& values, int64_t num_heads,
                           double scale, std::optional<int64_t> window, std::optional<double> softcap);

// Memory that a calling thread keeps between calls, aligned to a large page.
char* scratch(int64_t bytes);

void bind_attention(pybind11::module_& module);
void bind_baseline(pybind11::module_& module);
void bind_elementwise(pybind11::module_& module);
void bind_layer(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_rank(pybind11::module_& module);
void bind_sample(pybind11::module_& module);

}  // namespace echelon
