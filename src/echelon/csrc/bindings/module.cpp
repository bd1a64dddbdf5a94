// The kernels as a library of operations, `torch.ops.echelon`. Each file of bindings defines its own.
#include "../clock.h"
#include "../isa.h"
#include "bindings.h"

namespace echelon {
namespace {

// Of this thread: linear, attention.
std::tuple<double, double> seconds() { return {seconds_in[0], seconds_in[1]}; }

void use(std::string name, bool byte_products) { set_isa(name, byte_products); }

}  // namespace

STABLE_TORCH_LIBRARY(echelon, library) {
  library.def("isa() -> str");
  library.def("offered_isas() -> str[]");
  library.def("set_isa(str name, bool byte_products) -> ()");
  library.def("seconds_in() -> (float, float)");
  library.impl("isa", TORCH_BOX(&isa));
  library.impl("offered_isas", TORCH_BOX(&offered_isas));
  library.impl("set_isa", TORCH_BOX(&use));
  library.impl("seconds_in", TORCH_BOX(&seconds));
  define_attention(library);
  define_baseline(library);
  define_elementwise(library);
  define_layer(library);
  define_linear(library);
  define_rank(library);
  define_sample(library);
}

}  // namespace echelon
