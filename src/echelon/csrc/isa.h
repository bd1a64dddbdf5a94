// The instruction families that kernels are written for, and the one that serves this process.
#pragma once

#include <string>

namespace echelon {

enum class Isa { generic, avx2, avx512, avx512_bf16, amx };  // each includes the ones before it

// The best family that this processor and operating system offer.
Isa detected_isa();

// What kernels must use: the detected family, or a lesser one asked for by `set_isa`.
Isa active_isa();

// Throws std::invalid_argument for an unknown name or one that this machine lacks.
void set_isa(const std::string& name);

std::string isa_name(Isa isa);

}  // namespace echelon
