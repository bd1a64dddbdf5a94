// The Python face of linear.h.
#pragma once

#include <pybind11/pybind11.h>

namespace echelon {

void bind_linear(pybind11::module_& module);

}  // namespace echelon
