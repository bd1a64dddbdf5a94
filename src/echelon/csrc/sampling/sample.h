// Drawing tokens: filters as thresholds without a sort, and noise only for tokens that can still win. `echelon.sampling` is the definition.
#pragma once

#include <cstdint>

namespace echelon {

// One row: logits after everything that may change their order, and what draws from them.
struct SampleRow {
  const float* logits;
  float temperature;  // above 0
  int64_t top_k;      // 0 or less keeps all
  double top_p;
  float min_p;
  uint64_t seed, index, position;
};

// The token with the largest logit / temperature + noise among those that min_p, top_k and top_p leave; the first of equals. −1 where a
// logit is NaN or none is finite.
int64_t sample(const SampleRow& row, int64_t vocabulary);

}  // namespace echelon
