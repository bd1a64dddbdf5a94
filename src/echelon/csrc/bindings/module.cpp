// The Python face of the kernels: `echelon._kernels`. Each file of kernels binds its own operations.
#include <pybind11/stl.h>

#include "../clock.h"
#include "../isa.h"
#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("isa", &echelon::isa);
  module.def("offered_isas", &echelon::offered_isas);
  module.def("set_isa", &echelon::set_isa, pybind11::arg("name"), pybind11::arg("byte_products") = true);
  module.def("seconds_in", [] { return std::pair(echelon::seconds_in[0], echelon::seconds_in[1]); });  // of this thread: linear, attention
  echelon::bind_attention(module);
  echelon::bind_baseline(module);
  echelon::bind_elementwise(module);
  echelon::bind_layer(module);
  echelon::bind_linear(module);
  echelon::bind_rank(module);
  echelon::bind_sample(module);
}
