// The Python face of the kernels: `echelon._kernels`. Each file of kernels binds its own operations.
#include <pybind11/pybind11.h>

#include "bindings.h"
#include "isa.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("isa", [] { return echelon::isa_name(echelon::active_isa()); });
  module.def("set_isa", &echelon::set_isa);
  echelon::bind_attention(module);
  echelon::bind_elementwise(module);
  echelon::bind_rank(module);
  echelon::bind_sample(module);
  echelon::bind_linear(module);
  echelon::bind_yardstick(module);
}
