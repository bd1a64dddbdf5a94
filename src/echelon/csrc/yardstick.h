// What kernels are measured against.
#pragma once

#include <pybind11/pybind11.h>

namespace echelon {

// read_memory(tensor): every byte is read once, by all threads, and nothing else is done.
void bind_yardstick(pybind11::module_& module);

}  // namespace echelon
