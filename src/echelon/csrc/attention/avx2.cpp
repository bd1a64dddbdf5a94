// Attention in float32 arithmetic with AVX2, FMA and F16C.
#include <cmath>
#include <cstring>

#include <immintrin.h>

#include "attention.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#define REGISTER_LANES 8
#include "float_math.h"

namespace echelon {

const AttentionFamily avx2_attention{attend_float, combine_float};

}  // namespace echelon

#pragma GCC pop_options
