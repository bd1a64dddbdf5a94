// Attention over a bfloat16 cache with VDPBF16PS: two products an entry, summed into float32 lanes; nothing is widened on the way.
#include <immintrin.h>

#include "attention.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")

#define REGISTER_LANES 16
#include "tiles.h"

namespace echelon {
namespace {

// Entries are two bfloat16 numbers that lie side by side along the head, or in two keys one after the other.
struct PairMath {
  static constexpr int64_t grain = 2, bytes = 2;
  static constexpr bool reads_in_place = true;

  INLINE_METHOD static int64_t slot_bytes(int64_t size) { return size * bytes; }

  INLINE_METHOD static Register broadcast(const float* p) { return (Register)_mm512_set1_ps(*p); }
  INLINE_METHOD static Register multiply_add(Register a, Register b, Register c) { return (Register)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
  INLINE_METHOD static Lanes round_weights(const Lanes& weights) {
    return {{(Register)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)weights.part[0])), 16)}};
  }

  // Float32 weights that are bfloat16 numbers -> pairs, 16 of them at a time.
  INLINE_METHOD static void pack_weights(float* weights, int64_t count) {
    for (int64_t k = 0; k < count; k += 32) {
      const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)load_register(weights + k + 16), (__m512)load_register(weights + k));
      store(weights + k / 2, (Register)pairs);
    }
  }
  INLINE_METHOD static void copy_row(const char* from, int64_t size, int64_t width, float* to) {
    std::memcpy(to, from, static_cast<size_t>(size) * 2);
    std::memset(reinterpret_cast<char*>(to) + size * 2, 0, static_cast<size_t>(width * 4 - size * 2));
  }
  INLINE_METHOD static const float* row(const char* from, int64_t size, int64_t width, float* staged) {
    if (size == 2 * width) return reinterpret_cast<const float*>(from);
    copy_row(from, size, width, staged);
    return staged;
  }
  INLINE_METHOD static __m512i part(const char* row, int64_t from, int64_t size) {
    if (!row) return _mm512_setzero_si512();
    const int64_t count = size - from;
    return count >= 32 ? _mm512_loadu_si512(row + from * 2) : _mm512_maskz_loadu_epi16((1u << count) - 1, row + from * 2);
  }
  static constexpr int16_t low_half[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};

  // Two vectors of pairs from 32 columns of two rows.
  INLINE_METHOD static void pair_up(__m512i a, __m512i b, Register* to) {
    const __m512i low = _mm512_loadu_si512(low_half), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    to[0] = (Register)_mm512_permutex2var_epi16(a, low, b);
    to[1] = (Register)_mm512_permutex2var_epi16(a, high, b);
  }
  // value_columns of two rows.
  INLINE_METHOD static void entries(const char* const* rows, int64_t offset, Register* to) {
    const char *a = rows[0] + offset, *b = rows[1] + offset;
    const __m512i a0 = _mm512_loadu_si512(a), a1 = _mm512_loadu_si512(a + 64), b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64);
    pair_up(a0, b0, to);
    pair_up(a1, b1, to + 2);
  }
  INLINE_METHOD static void interleave(const char* const* rows, int64_t size, float* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34,
                                         2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t from = 0; from < size; from += 32) {
      const __m512i a = part(rows[0], from, size), b = part(rows[1], from, size);
      store(to + from, (Register)_mm512_permutex2var_epi16(a, low, b));
      if (from + 16 < size) store(to + from + 16, (Register)_mm512_permutex2var_epi16(a, high, b));
    }
  }
  INLINE_METHOD static bool are_finite(const float* values, int64_t count) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 special = 0;
    for (int64_t i = 0; i < count; i += lanes)
      special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512((__m512i)load_register(values + i), exponent), exponent);
    return special == 0;
  }
  INLINE_METHOD static void write_row(const float* sums, float total, int64_t size, char* to) {
    auto* out = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < size; ++i) out[i] = narrow_bfloat16(sums[i] / total);
  }
};

void attend_pairs(const AttentionCall& call, const AttentionUnit& unit, float* memory) { Unit<PairMath>(call, unit, memory).attend(); }
void combine_pairs(const AttentionCall& call, const AttentionUnit& unit, int64_t count, float* memory) {
  Unit<PairMath>(call, unit, memory).combine(count);
}

}  // namespace

const AttentionFamily avx512_bf16_attention{attend_pairs, combine_pairs};

}  // namespace echelon

#pragma GCC pop_options
