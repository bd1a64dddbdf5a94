// A tensor of logits in, tokens and scores out: checks and threads around rank.cpp.
#include <ATen/Parallel.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings.h"
#include "../sampling/rank.h"

namespace echelon {
namespace {

template <typename T>
using List = const std::vector<T>&;

// Logits float32 [M, V] → int64 [M, width], float64 [M, width].
std::tuple<at::Tensor, at::Tensor> likeliest_rows(const at::Tensor& logits, int64_t width, int64_t num_candidates, double sharpness,
                                                        bool only_ranks, List<double> temperature, List<int64_t> top_k, List<double> top_p,
                                                        List<double> min_p, List<uint64_t> seed, List<uint64_t> index,
                                                        List<uint64_t> position) {
  TORCH_CHECK(logits.scalar_type() == at::kFloat && logits.is_contiguous() && logits.dim() == 2, "logits must be float32 [M, V]");
  const int64_t rows = logits.size(0), size = logits.size(1);
  TORCH_CHECK(1 <= width && width <= num_candidates && num_candidates <= size, "width ≤ num_candidates ≤ V must hold");
  TORCH_CHECK(static_cast<int64_t>(temperature.size()) == rows, "every row needs its parameters");
  auto tokens = at::empty({rows, width}, at::kLong), scores = at::empty({rows, width}, at::kDouble);
  const float* from = logits.const_data_ptr<float>();
  int64_t* to_tokens = tokens.mutable_data_ptr<int64_t>();
  double* to_scores = scores.mutable_data_ptr<double>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto i = static_cast<size_t>(row);
      const Draw draw{temperature[i], top_k[i], top_p[i], min_p[i], seed[i], index[i], position[i]};
      likeliest(from + row * size, size, draw, width, num_candidates, sharpness, only_ranks, to_tokens + row * width,
                to_scores + row * width);
    }
  });
  return {tokens, scores};
}

}  // namespace

void bind_rank(pybind11::module_& module) {
  module.def("likeliest_rows", &likeliest_rows, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace echelon
