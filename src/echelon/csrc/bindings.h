// What each file of bindings adds to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace echelon {

void bind_attention(pybind11::module_& module);
void bind_elementwise(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_rank(pybind11::module_& module);
void bind_sample(pybind11::module_& module);
void bind_yardstick(pybind11::module_& module);

}  // namespace echelon
