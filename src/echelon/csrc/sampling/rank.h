// The likeliest tokens of a row of logits, with their log-probabilities: what trees of drafted tokens grow from.
// `echelon.ops.reference.likeliest_rows` is the definition.
#pragma once

#include <cstdint>

namespace echelon {

// What draws from a row; greedy at temperature 0, where the rest is not read.
struct Draw {
  double temperature;
  int64_t top_k;  // 0 or less keeps all
  double top_p, min_p;
  uint64_t seed, index, position;
};

// `width` tokens of one row of logits, the likeliest first and the lower id of equals, and their scores. A greedy row's are
// log-probabilities of the logits times `sharpness`, or relative to the likeliest one's with `only_ranks`. A drawn row ranks its
// `num_candidates` likeliest tokens by filtered and perturbed logits; the scores are the log-softmax of these times `sharpness`. −∞ for a token that cannot come, and
// everywhere if the largest logit is not finite or one is NaN. 1 ≤ width ≤ num_candidates ≤ vocabulary. Nothing depends on other rows.
void likeliest(const float* logits, int64_t vocabulary, const Draw& draw, int64_t width, int64_t num_candidates, double sharpness,
               bool only_ranks, int64_t* tokens, double* scores);

}  // namespace echelon
