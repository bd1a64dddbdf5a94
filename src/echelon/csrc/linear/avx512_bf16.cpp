// Linear layers in bfloat16 with VDPBF16PS: pairs of products summed into float32 lanes.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")

#include "finish.h"

namespace echelon::linear {
namespace {

constexpr int64_t depth_block = 256;  // 16 KiB of weight
constexpr int64_t x_stride = depth_block / 2 + x_padding / 4;  // in pairs
constexpr int few_rows = 6, block_rows = 14;  // few: the processor's own fetching ahead does better, if it is not late

template <bool fetches_late, int rows>
void multiply(const void* x, const void* w, int64_t steps, float* sums, Prefetch prefetch, Integers) {
  const int32_t* pairs = static_cast<const int32_t*>(x);
  const char* column = static_cast<const char*>(w);
  __m512 low[rows], high[rows];
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    low[r] = _mm512_load_ps(sums + r * tile);
    high[r] = _mm512_load_ps(sums + r * tile + 16);
  }
  for (int64_t s = 0; s < steps; ++s) {
    if constexpr (rows > (fetches_late ? 1 : few_rows)) fetch(prefetch, s, 0, 1);
    const __m512bh first = (__m512bh)_mm512_loadu_si512(column + s * 128), second = (__m512bh)_mm512_loadu_si512(column + s * 128 + 64);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[r * x_stride + s]);
      low[r] = _mm512_dpbf16_ps(low[r], first, pair);
      high[r] = _mm512_dpbf16_ps(high[r], second, pair);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r) {
    _mm512_store_ps(sums + r * tile, low[r]);
    _mm512_store_ps(sums + r * tile + 16, high[r]);
  }
}

void pack_x(const void* x, int64_t count, void* packed) {
  std::memcpy(packed, x, count * 2);
  std::memset(static_cast<char*>(packed) + count * 2, 0, (depth_block - count) * 2);
}

template <bool fetches_late, int n, int... rest>
struct Count : Count<fetches_late, n - 1, n, rest...> {};
template <bool fetches_late, int... n>
struct Count<fetches_late, 0, n...> {
  static constexpr Family family{"avx512_bf16", 1, block_rows, depth_block, depth_block, 2, 2, pack_x, {multiply<fetches_late, n>...}, finish<0>, nothing, nothing};
};

}  // namespace

const Family& avx512_bf16_family(bool fetches_late) { return fetches_late ? Count<true, block_rows>::family : Count<false, block_rows>::family; }

}  // namespace echelon::linear

#pragma GCC pop_options
