// Lists of rows in, tokens out: checks and threads around sample.cpp.
#include <vector>

#include "bindings.h"
#include "../sampling/sample.h"

namespace echelon {
namespace {

std::vector<int64_t> sample_rows(List<Tensor> rows, List<double> temperature, List<int64_t> top_k, List<double> top_p,
                                 List<double> min_p, List<int64_t> seed, List<int64_t> index, List<int64_t> position) {
  std::vector<SampleRow> work;
  for (size_t i = 0; i < rows.size(); ++i) {
    CHECK(rows[i].scalar_type() == ScalarType::Float && rows[i].is_contiguous() && rows[i].dim() == 1, "logits must be float32 [V]");
    work.push_back({data_of<float>(rows[i]), static_cast<float>(temperature[i]), top_k[i], top_p[i], static_cast<float>(min_p[i]),
                    unsigned_of(seed[i]), unsigned_of(index[i]), unsigned_of(position[i])});
  }
  std::vector<int64_t> tokens(rows.size());
  in_parallel(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) tokens[i] = sample(work[i], rows[i].size(0));
  });
  return tokens;
}

}  // namespace

void define_sample(Library& library) {
  library.def("sample_rows(Tensor[] rows, float[] temperature, int[] top_k, float[] top_p, float[] min_p, int[] seed, int[] index, "
              "int[] position) -> int[]");
  library.impl("sample_rows", TORCH_BOX(&sample_rows));
}

}  // namespace echelon
