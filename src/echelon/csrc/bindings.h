// What each file of bindings adds to the module.
#pragma once

#include <pybind11/pybind11.h>

namespace echelon {

void bind_elementwise(pybind11::module_& module);

}  // namespace echelon
