// The control flow of AMX on tiles in memory, for tests on machines without tile registers.
#include "tiles.h"

namespace echelon::linear {
namespace {

struct EmulatedTiles {
  char tiles[8][16][64];

  static void enter() {}
  static void leave() {}

  template <int i>
  void load(const void* p, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(tiles[i][row], static_cast<const char*>(p) + row * stride, 64);
  }
  template <int i>
  void store(void* p, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(p) + row * stride, tiles[i][row], 64);
  }
  template <int i>
  void zero() {
    std::memset(tiles[i], 0, sizeof tiles[i]);
  }
  static void widen(const uint16_t* halves, float* to) {
    for (int64_t c = 0; c < tile; ++c) to[c] = to_float(halves[c], Storage::float16);
  }
};

struct EmulatedNumbers : EmulatedTiles {
  static constexpr int bits = 0, x_entry = 2;
  // One fixed order over K; the processor's own order within a tile is its own.
  template <int c, int a, int b>
  void dot() {
    float sums[16][16];
    uint16_t x[16][32], w[16][32];
    std::memcpy(sums, tiles[c], sizeof sums);
    std::memcpy(x, tiles[a], sizeof x);
    std::memcpy(w, tiles[b], sizeof w);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 32; ++k)
        for (int column = 0; column < 16; ++column)
          sums[row][column] += to_float(x[row][k], Storage::bfloat16) * to_float(w[k / 2][2 * column + k % 2], Storage::bfloat16);
    std::memcpy(tiles[c], sums, sizeof sums);
  }
};

template <int bits_>
struct EmulatedIntegers : EmulatedTiles {
  static constexpr int bits = bits_, x_entry = 1;
  template <int c, int a, int b>
  void dot() {
    uint32_t sums[16][16];
    std::memcpy(sums, tiles[c], sizeof sums);
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 64; ++k)
        for (int column = 0; column < 16; ++column) {
          const int x = static_cast<signed char>(tiles[a][row][k]), byte = static_cast<unsigned char>(tiles[b][k / 4][4 * column + k % 4]);
          sums[row][column] += static_cast<uint32_t>(x * (bits == 8 ? byte : static_cast<signed char>(byte)));
        }
    std::memcpy(tiles[c], sums, sizeof sums);
  }
};

constexpr Family numbers = tile_family<EmulatedNumbers>("emulated amx");
constexpr Family bytes = tile_family<EmulatedIntegers<8>>("emulated amx_int8"), halves = tile_family<EmulatedIntegers<4>>("emulated amx_int8");

}  // namespace

const Family& emulated_amx(int bits) { return bits == 8 ? bytes : bits == 4 ? halves : numbers; }

}  // namespace echelon::linear
