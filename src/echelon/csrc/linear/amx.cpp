// Linear layers with AMX: products of 16 × 32 by 32 × 16 bfloat16, or of 16 × 64 by 64 × 16 bytes, in tile registers.
#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,amx-tile,amx-bf16,amx-int8,prefer-vector-width=512")

#include "tiles.h"

namespace echelon::linear {
namespace {

// Layout of the operand of LDTILECFG (Intel SDM, volume 1, section 18.3).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct ProcessorTiles {
  // The registers are each thread's own, so every worker configures them and lets go of them.
  static void enter() {
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
  }
  static void leave() { _tile_release(); }

  // Written out, because GCC's intrinsics take literal register numbers alone.
  template <int i>
  void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(i) : "memory");
  }
  template <int i>
  void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(i) : "memory");
  }
  template <int i>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(i));
  }
  static void widen(const uint16_t* halves, float* to) {
    for (int64_t c = 0; c < tile; c += 16)
      _mm512_store_ps(to + c, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + c))));
  }
};

struct NumberTiles : ProcessorTiles {
  static constexpr int bits = 0, x_entry = 2;
  template <int c, int a, int b>
  void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

template <int bits_>
struct IntegerTiles : ProcessorTiles {
  static constexpr int bits = bits_, x_entry = 1;
  template <int c, int a, int b>
  void dot() {  // x has signs, and the weight where its zeros have been subtracted
    if constexpr (bits == 8)
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    else
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
  }
};

constexpr Family amx = tile_family<NumberTiles>("amx");
constexpr Family bytes = tile_family<IntegerTiles<8>>("amx_int8"), halves = tile_family<IntegerTiles<4>>("amx_int8");

}  // namespace

const Family& amx_family() { return amx; }
const Family& amx_integers(int bits) { return bits == 8 ? bytes : halves; }

}  // namespace echelon::linear

#pragma GCC pop_options
