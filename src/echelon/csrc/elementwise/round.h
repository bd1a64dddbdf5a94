// Rows rounded to integers of 8 bits: activations before they are multiplied, keys and values before they are kept.
#pragma once

#include "../numbers.h"

namespace echelon {

constexpr float rounding_magic = 12582912.0f;  // 1.5 · 2²³: adding it rounds to an integer, ties to even, which the low bits then hold

// Rounds x [depth] to integers in ±127 by its largest entry, ties to even; adds their negated sums over each group, of which `depth` may
// hold none. Returns the scale: NaN where the row is not finite, and then all integers are 0.
float round_row(const void* x, int64_t depth, Storage type, int64_t group, int8_t* out, int32_t* sums);

}  // namespace echelon
