// A tensor of logits in, tokens and scores out: checks and threads around rank.cpp.
#include <tuple>
#include <vector>

#include "bindings.h"
#include "../sampling/rank.h"

namespace echelon {
namespace {

// Logits float32 [M, V] → int64 [M, width], float64 [M, width].
std::tuple<Tensor, Tensor> likeliest_rows(const Tensor& logits, int64_t width, int64_t num_candidates, double sharpness,
                                                        bool only_ranks, List<double> temperature, List<int64_t> top_k, List<double> top_p,
                                                        List<double> min_p, List<int64_t> seed, List<int64_t> index,
                                                        List<int64_t> position) {
  CHECK(logits.scalar_type() == ScalarType::Float && logits.is_contiguous() && logits.dim() == 2, "logits must be float32 [M, V]");
  const int64_t rows = logits.size(0), size = logits.size(1);
  CHECK(1 <= width && width <= num_candidates && num_candidates <= size, "width ≤ num_candidates ≤ V must hold");
  CHECK(static_cast<int64_t>(temperature.size()) == rows, "every row needs its parameters");
  const Tensor tokens = empty({rows, width}, ScalarType::Long), scores = empty({rows, width}, ScalarType::Double);
  const float* from = data_of<float>(logits);
  int64_t* to_tokens = to_data_of<int64_t>(tokens);
  double* to_scores = to_data_of<double>(scores);
  in_parallel(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto i = static_cast<size_t>(row);
      const Draw draw{temperature[i], top_k[i], top_p[i], min_p[i], unsigned_of(seed[i]), unsigned_of(index[i]), unsigned_of(position[i])};
      likeliest(from + row * size, size, draw, width, num_candidates, sharpness, only_ranks, to_tokens + row * width,
                to_scores + row * width);
    }
  });
  return {tokens, scores};
}

}  // namespace

void define_rank(Library& library) {
  library.def("likeliest_rows(Tensor logits, int width, int num_candidates, float sharpness, bool only_ranks, float[] temperature, int[] top_k, "
              "float[] top_p, float[] min_p, int[] seed, int[] index, int[] position) -> (Tensor, Tensor)");
  library.impl("likeliest_rows", TORCH_BOX(&likeliest_rows));
}

}  // namespace echelon
