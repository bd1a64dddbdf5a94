// Attention in float32 arithmetic with AVX-512.
#include <cmath>
#include <cstring>

#include <immintrin.h>

#include "attention.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,prefer-vector-width=512")

#define REGISTER_LANES 16
#include "float_math.h"

namespace echelon {

const AttentionFamily avx512_attention{attend_float, combine_float};

}  // namespace echelon

#pragma GCC pop_options
