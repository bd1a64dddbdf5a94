// Linear layers over weights that are packed once: y = activation(x · Wᵀ + bias), rounded once at the end.
//
// The contract: an entry of y is a function of its row of x, its row of W and its bias, bit for bit; the number of rows, the row's
// index and the number of threads do not enter. Every sum is one float32 chain over K in rising order, whatever the blocking:
// blocks of K hand the chain on through memory, threads share out columns and never K.
//
// A weight of 8 or 4 bits is multiplied in integers: x is rounded to 8 bits, each row by its own largest entry; sums of products are exact,
// over all of K where a column has one scale, else over a group of K, and groups are then one float32 chain. So every family gives the
// same bits.
//
// No PyTorch here: the sanitiser harness builds these files alone (bindings/linear.cpp is the binding).
#pragma once

#include <cstddef>
#include <cstdint>

#include "../elementwise/round.h"
#include "../isa.h"
#include "../numbers.h"
#include "../workers.h"

namespace echelon::linear {

constexpr int64_t tile = 32;           // columns of y that are worked on together
constexpr int64_t tiles_at_once = 4;  // that a worker takes, the last ones one by one where they are not worked on side by side

// A weight of integers is q − z times a scale, with q of 8 or 4 bits and without a sign.
struct Integers {
  int bits = 0;            // 8 or 4; 0: the weight is made of numbers
  int64_t group = 0;       // of 4 bits: 32, 64 or 128 entries of K that share a scale
  bool has_zeros = false;  // of 4 bits: each group of a column has a z of its own; else z is 8, and of 8 bits it is 128

  bool operator==(const Integers&) const = default;
};

// W [columns, depth] in tiles of 32 columns, ⌈columns / 32⌉ of them one after the other; what is padded multiplies zeros.
//   numbers  [padded depth / g][32][g] with g = 2 for bfloat16, whose instructions take entries of K in pairs (and 32 at a time in tile
//            registers), and g = 1 otherwise
//   8 bits   float32 [32], the scales; then uint8 [padded depth / 4][32][4]
//   4 bits   float32 [32], a factor of a column's scales; then for every group float16 [32], its scales, uint8 [32], its z, where the weight
//            has them, and uint8 [group / 8][32][4], the first four entries of eight in the low halves of the bytes and the rest in the high
struct Weight {
  const void* data;
  int64_t columns, depth;
  Storage type;  // of x, and of the weight's numbers
  Integers integers = {};
};

int64_t size_of(Storage type);
int64_t padded_depth(const Weight& weight);
int64_t tile_bytes(const Weight& weight);
inline int64_t tiles(int64_t columns) { return (columns + tile - 1) / tile; }
inline int64_t bytes_of(const Weight& weight) { return tiles(weight.columns) * tile_bytes(weight); }

// Packs tiles first … last − 1 of a W of numbers, whose entry (n, k) lies at source[n · row_stride + k · column_stride].
void pack_tiles(const void* source, int64_t row_stride, int64_t column_stride, int64_t columns, int64_t depth, Storage type, int64_t first,
                int64_t last, void* packed);

// What a weight of integers is packed from, [columns, …] each: its q [depth], and for every group its scale and z (null: none of its own).
struct Quantised {
  const uint8_t* values;
  const float* scales;
  const uint8_t* zeros;
};
// Packs tiles first … last − 1 into the weight's memory.
void pack_tiles(const Quantised& source, const Weight& weight, int64_t first, int64_t last, void* packed);

// Row `row` of a W of numbers as it was before packing: `depth` entries.
void unpack_row(const Weight& weight, int64_t row, void* out);

struct Problem {
  const void* x;  // [rows, depth] of the weight's type
  int64_t rows, x_stride;
  Weight weight;
  const float* bias;  // [columns] or null
  Activation activation;
  void* out;  // [rows, columns], float32 or of the weight's type
  int64_t out_stride;
  bool out_is_f32;
};

// What a step fetches for later ones: two lines for the first-level cache, and weight from further on for the second, whose longer queue
// keeps memory at work while registers multiply. With few rows these have so little to do that the processor's own fetching ahead does
// better alone.
struct Prefetch {
  const char *near, *beside, *far;
  int64_t far_second;  // bytes from one line of `far` to another; 0: there is one
  int64_t stride;      // bytes from what one step fetches to what the next one does
};

// Of `parts` blocks of columns that go over the same weight, the first fetches what is near, and two share out what is far.
inline __attribute__((always_inline)) void fetch(const Prefetch& prefetch, int64_t step, int64_t part, int64_t parts) {
  const int64_t at = step * prefetch.stride;
  if (part == 0) {
    __builtin_prefetch(prefetch.near + at);
    __builtin_prefetch(prefetch.beside + at);
  }
  if (part == 0) __builtin_prefetch(prefetch.far + at, 0, 2);
  if (part == parts / 2 && prefetch.far_second) __builtin_prefetch(prefetch.far + prefetch.far_second + at, 0, 2);
}

// What a family of instructions brings along. `steps` are the entries of K in one block of depth: one by one, in pairs for bfloat16, in
// fours for 8 bits and in eights for 4; a block of rows has `unit`, 2 · unit, … rows; sums are float32 [rows][32], or int32 for 8 bits.
struct Family {
  const char* name;
  int64_t unit, most_units;  // rows of a register block: a multiple of `unit`, at most `most_units` of them
  int64_t depth_block;       // entries of K between two visits to memory
  int64_t few_depth;         // the same where there are few rows
  int64_t x_entry;           // bytes of an entry of K in packed x
  int64_t lines_per_step;    // 64-byte lines of the weight in one step
  // One row of one depth block: `count` entries of x, which are int8 for a weight of integers; zeros up to depth_block.
  void (*pack_x)(const void* x, int64_t count, void* packed);
  // sums += x · w over `steps`.
  using Multiply = void (*)(const void* x, const void* w, int64_t steps, float* sums, Prefetch prefetch, Integers integers);
  Multiply multiply[16];  // by number of units, less one
  // Sums [rows][32] of tile t to y. `after_x`: what follows the first entries of the first row in packed x, and bytes to the next row's.
  struct AfterX {
    const char* first;
    int64_t stride;
  };
  void (*finish)(const Problem& problem, int64_t t, int64_t first_row, int64_t rows, const float* sums, AfterX after_x);
  void (*enter)();  // before and after a thread's share of the work
  void (*leave)();
  int64_t short_block = 0;  // units of the last of two blocks, where the rest fits into one: fuller registers; 0: both blocks are alike
  bool sums_of_groups = false;  // x has those of 4 bits beside it
};

constexpr int64_t x_padding = 64;  // bytes after a row of packed x, so that rows do not compete for the same cache sets
constexpr int64_t most_rows = 512;  // rows of one pass over the weight
// What a worker writes all the time has pages of its own: a core fetches ahead within a page, and would take lines from another that writes them.
constexpr int64_t page = 4096;
inline int64_t whole_pages(int64_t bytes) { return (bytes + page - 1) / page * page; }

// What lies there where x has been rounded to integers. Sums, for the families that take them, are those of its integers over each group of the
// depth block, negated, times the z of all groups where these have none of their own; the last two are of the whole row.
struct Rounded {
  int32_t sums[8];
  int32_t unused[6];
  int32_t sum;
  float scale;  // NaN where the row is not finite
};
static_assert(sizeof(Rounded) == x_padding);

// Rounds a row of a weight [depth] to integers without a sign, each group beside its scale (scale · (q − z), with z 128 or 8): of 8 bits
// the row's largest magnitude decides, and of 4 the least squared error among scales near that of a group's.
void round_weight(const void* row, int64_t depth, Storage type, Integers integers, uint8_t* values, float* scales);

// The best implementation for the type, bits and so many rows among those that the features allow.
const Family& family(Features features, Storage type, int bits, int64_t rows);
// The tile registers' control flow on emulated tiles, for tests on machines without them: bfloat16 and integers.
const Family& emulated_amx(int bits = 0);

// The work on rows first_row … first_row + rows − 1 (at most most_rows) in two phases: all workers pack their share of the rows of x, and
// when all have, multiply by tiles of the weight. `packed_x` is shared, `sums` is each worker's own, in pages of its own; both are aligned to 64 bytes. What is
// packed serves every weight of this type and depth.
struct Pass {
  const Problem& problem;
  const Family& family;
  int64_t first_row, rows;

  int64_t padded_rows() const { return (rows + family.unit - 1) / family.unit * family.unit; }
  int64_t depth_blocks() const;
  struct Units {
    int64_t first, count;
  };
  Units block(int64_t b, int64_t blocks) const;  // of rows that are multiplied at once
  int64_t row_bytes() const { return family.depth_block * family.x_entry + x_padding; }
  int64_t x_bytes() const { return depth_blocks() * padded_rows() * row_bytes(); }
  int64_t group() const;  // tiles worked on side by side
  int64_t least() const { return group() > 1 ? tiles_at_once : 1; }  // tiles that a worker takes at the end of a share
  int64_t sums_bytes() const { return whole_pages(group() * padded_rows() * tile * 4); }

  void pack(Worker worker, void* packed_x) const;
  void multiply(int64_t first_tile, int64_t last_tile, const void* packed_x, float* sums) const;

 private:
  void pack_numbers(int64_t row, char* to) const;
  void pack_integers(int64_t row, char* to) const;
};

const Family& generic_family(Storage type);
const Family& avx2_family(Storage type);
const Family& avx512_family(Storage type);
const Family& avx512_bf16_family(bool fetches_late);
const Family& amx_family();

const Family& generic_integers(int bits);
const Family& avx2_integers(int bits);
const Family& avx_vnni_integers(int bits);
const Family& avx512_integers(int bits);
const Family& avx512_vnni_integers(int bits, bool fetches_late);
const Family& amx_integers(int bits);

}  // namespace echelon::linear
