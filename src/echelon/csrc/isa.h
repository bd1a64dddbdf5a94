// What a processor can do, and the sets of it that kernels are written for.
#pragma once

#include <string>
#include <vector>

namespace echelon {

// Kernels say which of these they need, so another one is another bit here and another line where kernels are chosen.
enum Feature : unsigned {
  avx2 = 1 << 0,         // and all else of x86-64-v3: FMA, F16C, BMI1 and 2, LZCNT, MOVBE
  avx512 = 1 << 1,       // F, BW, CD, DQ and VL: x86-64-v4
  avx512_bf16 = 1 << 2,  // products of pairs of bfloat16
  amx_bf16 = 1 << 3,     // tile registers, and products of bfloat16 tiles
  avx_vnni = 1 << 4,     // products of four bytes summed to int32, in registers of 256 bits
  avx512_vnni = 1 << 5,  // and of 512
  amx_int8 = 1 << 6,     // and of tiles
  fetches_late = 1 << 7,  // no instructions: left to itself the processor fetches weights too late even for few rows, as Intel's do and AMD's do not
};
using Features = unsigned;  // a sum of Feature

inline bool has(Features features, Features needed) { return (features & needed) == needed; }

// What kernels may use: what this processor and operating system offer, or the lesser set that the environment's ECHELON_ISA or `set_isa`
// names. Throws std::invalid_argument where ECHELON_ISA names none that this machine offers.
Features active_features();

// The largest named set within the active features: generic, avx2, avx512, avx512_bf16 or amx.
std::string isa();

// The named sets that this machine offers, the smallest first.
std::vector<std::string> offered_isas();

// Use a named set, with what the processor has for products of bytes within it or without. Throws std::invalid_argument for one that this
// machine does not offer.
void set_isa(const std::string& name, bool byte_products = true);

}  // namespace echelon
