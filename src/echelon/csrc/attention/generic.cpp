// Attention in float32 arithmetic for any processor.
#define REGISTER_LANES 4
#include "float_math.h"

namespace echelon {

const AttentionFamily generic_attention{attend_float, combine_float};

}  // namespace echelon
