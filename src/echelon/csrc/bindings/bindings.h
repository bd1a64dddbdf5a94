// What each file of bindings adds to the module, and how they read tensors.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include "../types.h"

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

void bind_attention(pybind11::module_& module);
void bind_baseline(pybind11::module_& module);
void bind_elementwise(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_rank(pybind11::module_& module);
void bind_sample(pybind11::module_& module);

}  // namespace echelon
