// What several kernels are told by: how numbers are stored, and which function is applied to them.
#pragma once

namespace echelon {

enum class Storage { float32, bfloat16, float16 };

enum class Activation { none, relu, silu, gelu, gelu_tanh };  // `echelon.ops.contract.Activation`

}  // namespace echelon
