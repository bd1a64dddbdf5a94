// A call of attention in pieces that threads take in turn.
#pragma once

#include <utility>
#include <vector>

#include "attention.h"

namespace echelon {

// The work of a call in units, the longest first, and those whose sections are to be combined afterwards: the first of each and how many
// there are. The call's partials are so many floats.
struct Division {
  std::vector<AttentionUnit> units;
  std::vector<std::pair<AttentionUnit, int64_t>> combinations;
  int64_t num_partials = 0;
};

// Pieces that none of `num_threads` need wait for, a quarter of a thread's share of all keys each: blocks of a row's tokens, of these some
// heads, and of a head sections of keys. However long one row is among short ones, all threads have as much to do.
Division divide(const AttentionCall& call, int64_t num_threads);

// Whether two calls of the same rows are divided alike.
bool are_divided_alike(const AttentionCall& call, const AttentionCall& other);

}  // namespace echelon
