// Noise that is a pure function of request, position and token. `echelon.sampling` is the definition.
#pragma once

#include <cmath>
#include <cstdint>

#include "../numbers.h"

namespace echelon {

constexpr uint64_t golden = 0x9E3779B97F4A7C15;

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
INLINE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

// Of choosing a token; the last term is the purpose, 0.
inline uint64_t noise_key(uint64_t seed, uint64_t index, uint64_t position) {
  uint64_t key = mix(seed + golden);
  key = mix(key ^ mix(index * golden + 1));
  key = mix(key ^ mix(position * golden + 2));
  return mix(key ^ mix(3));
}

// 52 bits b, so that u = (b + ½) / 2⁵² is exact, and never 0 or 1.
INLINE uint64_t noise_bits(uint64_t key, int64_t token) { return mix(key + (static_cast<uint64_t>(token) + 1) * golden) >> 12; }

inline double gumbel(uint64_t bits) { return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-52)); }

}  // namespace echelon
