// Lists of rows in, tokens out: checks and threads around sample.cpp.
#include <ATen/Parallel.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings.h"
#include "../sampling/sample.h"

namespace echelon {
namespace {

template <typename T>
using List = const std::vector<T>&;

std::vector<int64_t> sample_rows(List<at::Tensor> rows, List<double> temperature, List<int64_t> top_k, List<double> top_p,
                                 List<double> min_p, List<uint64_t> seed, List<uint64_t> index, List<uint64_t> position) {
  std::vector<SampleRow> work;
  for (size_t i = 0; i < rows.size(); ++i) {
    TORCH_CHECK(rows[i].scalar_type() == at::kFloat && rows[i].is_contiguous() && rows[i].dim() == 1, "logits must be float32 [V]");
    work.push_back({rows[i].const_data_ptr<float>(), static_cast<float>(temperature[i]), top_k[i], top_p[i], static_cast<float>(min_p[i]),
                    seed[i], index[i], position[i]});
  }
  std::vector<int64_t> tokens(rows.size());
  at::parallel_for(0, static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) tokens[i] = sample(work[i], rows[i].size(0));
  });
  return tokens;
}

}  // namespace

void bind_sample(pybind11::module_& module) {
  module.def("sample_rows", &sample_rows, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace echelon
