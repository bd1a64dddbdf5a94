// Linear layers over integers with VPDPBUSD in registers of 256 bits: products of four bytes summed into lanes of int32.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")

#include "integers.h"
#include "lanes256.h"

namespace echelon::linear {
namespace {

// Of 4 bits a block of registers holds float32 sums beside those of a group.
template <int bits>
struct Fours : Lanes256 {
  static constexpr const char* name = "avx_vnni";
  static constexpr int most_rows = 5, entry_bytes = 4, few_rows = 2;
  static constexpr bool narrow = false;
  static constexpr int at_once(int rows) { return (rows <= 2 ? 4 : 2) / (bits == 8 ? 1 : 2); }
  using Quads = Register;

  static Quads quads(Register v) { return v; }
  static Register entry(const char* x) { return all(word(x)); }
  static Register dot(Register sum, Quads w, Register x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
};

}  // namespace

const Family& avx_vnni_integers(int bits) { return bits == 8 ? IntegerFamily<Fours<8>, 8>::family : IntegerFamily<Fours<4>, 4>::family; }

}  // namespace echelon::linear

#pragma GCC pop_options
