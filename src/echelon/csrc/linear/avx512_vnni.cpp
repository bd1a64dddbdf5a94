// Linear layers over integers with VPDPBUSD in registers of 512 bits: products of four bytes summed into lanes of int32.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

#include "integers.h"
#include "lanes512.h"

namespace echelon::linear {
namespace {

// Of 4 bits a block of registers holds float32 sums beside those of a group. It has two columns of registers, so that products of one do not
// wait for each other.
template <int bits, bool fetches_late>
struct Fours : Lanes512 {
  static constexpr const char* name = "avx512_vnni";
  static constexpr int most_rows = bits == 8 ? 13 : 6, entry_bytes = 4, few_rows = fetches_late ? 0 : bits == 8 ? 6 : 2;
  static constexpr bool narrow = false;
  static constexpr int at_once(int) { return 2; }
  using Quads = Register;

  static Quads quads(Register v) { return v; }
  static Register entry(const char* x) { return all(word(x)); }
  static Register dot(Register sum, Quads w, Register x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

}  // namespace

const Family& avx512_vnni_integers(int bits, bool fetches_late) {
  if (fetches_late) return bits == 8 ? IntegerFamily<Fours<8, true>, 8>::family : IntegerFamily<Fours<4, true>, 4>::family;
  return bits == 8 ? IntegerFamily<Fours<8, false>, 8>::family : IntegerFamily<Fours<4, false>, 4>::family;
}

}  // namespace echelon::linear

#pragma GCC pop_options
