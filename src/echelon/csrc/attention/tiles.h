// Attention of one unit, as templates over the arithmetic: for files that compile it for one family of processors or another.
//
// A tile is 64 keys at a multiple of 64 from position 0. Keys and weights are handled in 32-bit entries, which `Math` multiplies and adds
// up: one float32 each, or two bfloat16 side by side. Within one entry, and over entries, the order of additions is fixed, whatever else the
// unit holds: so a query's bits depend on what it sees alone.
#pragma once

#include <cmath>

#include "registers.h"

namespace echelon {
namespace {

constexpr int64_t few_pairs = register_lanes == 16 ? most_few_pairs : 0;
constexpr int64_t value_columns = 64;  // at a time
constexpr float minus_infinity = -__builtin_inff();

// Sums that a block keeps in registers: rows of queries or weights by registers of keys or values.
constexpr bool has_many_registers = register_lanes == 16;
constexpr int score_rows = has_many_registers ? 4 : 6, score_registers = 2;
constexpr int value_rows = has_many_registers ? 4 : 6, value_registers = has_many_registers ? 4 : 2;
constexpr int lone_registers = 4;  // for one row

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float most(float a, float b) { return a > b ? a : b; }
INLINE void zero(float* to, int64_t count) { std::memset(to, 0, static_cast<size_t>(count) * sizeof(float)); }

// Call `work` with the number of rows and the first of each block: `largest` rows, then as many of 4, of 2 and of 1 as are left.
template <int largest, class Work>
INLINE void by_blocks(int64_t rows, const Work& work, int64_t from = 0) {
  for (; from + largest <= rows; from += largest) work(std::integral_constant<int, largest>{}, from);
  if constexpr (largest > 1) by_blocks<(largest > 4 ? 4 : largest / 2)>(rows, work, from);
}

// 16 rows to be prefetched, one at a time while others are computed with; none where `lines` is 0.
struct Prefetch {
  const char* const* rows = nullptr;
  int64_t offset = 0, lines = 0;

  INLINE_METHOD void fetch(int64_t row) const {
    for (int64_t i = 0; i < lines; ++i) {
      const auto at = reinterpret_cast<uintptr_t>(rows[row]) + static_cast<uintptr_t>(offset + i * 64);
      __builtin_prefetch(reinterpret_cast<const void*>(at));  // a null row fetches nothing
    }
  }
  INLINE_METHOD void fetch_all() const {
    for (int64_t row = 0; row < lanes; ++row) fetch(row);
  }
};

// Entries [from, from + 16) of 16 rows -> 16 columns of key_tile keys each, a square of registers at a time.
INLINE void transpose(const float* const* rows, int64_t from, float* columns) {
  for (int64_t row = 0; row < lanes; row += register_lanes)
    for (int64_t column = from; column < from + lanes; column += register_lanes) {
      Register v[register_lanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < register_lanes; ++i) v[i] = load_register(rows[row + i] + column);
      exchange_all<1>(v);
      exchange_all<2>(v);
      if constexpr (register_lanes > 4) exchange_all<4>(v);
      if constexpr (register_lanes > 8) exchange_all<8>(v);
#pragma GCC unroll 16
      for (int64_t i = 0; i < register_lanes; ++i) store(columns + (column + i) * key_tile + row, v[i]);
    }
}

// The product of a query and a key is summed in four chains, over every fourth entry, which are then added in pairs.
// For few queries from the keys as they lie: four keys' four entries at a time, whose chains are added up crosswise for 16 keys.
template <int h>
INLINE void add_pairs(Lanes* v) {
#pragma GCC unroll 4
  for (int i = 0; i < chains; i += 2 * h) {
    exchange<h>(v[i], v[i + h]);
    v[i] = v[i] + v[i + h];
  }
}
INLINE Lanes add_crosswise(Lanes* v) {
  add_pairs<1>(v);
  add_pairs<2>(v);
  return v[0];
}
template <class Math>
INLINE Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
  return by_parts([](Register x, Register y, Register z) ALWAYS_INLINE { return Math::multiply_add(x, y, z); }, a, b, c);
}
// Scores [P][key_tile] of P queries, each of whose quads is there four times, against 16 keys.
template <class Math, int P>
INLINE void products_of_rows(const float* const* rows, const float* quads, int64_t steps, const Prefetch& prefetch, float* scores) {
  Lanes v[P][chains];
#pragma GCC unroll 4
  for (int j = 0; j < chains; ++j) {  // keys j, j + 4, j + 8, j + 12
    for (int i = 0; i < lanes; i += chains) prefetch.fetch(j + i);
    Lanes sum[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) sum[p] = Lanes{};
    for (int64_t from = 0; from < steps; from += lanes)
#pragma GCC unroll 4
      for (int64_t at = from; at < from + lanes; at += chains) {
        const Lanes keys = quads_of_rows(rows + j, at);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) sum[p] = multiply_add<Math>(load(quads + (p * steps + at) * chains), keys, sum[p]);
      }
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) v[p][j] = sum[p];
  }
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) store(scores + p * key_tile, add_crosswise(v[p]));
}

// For many, from transposed keys: the sums of chains [0, count) of M queries and N registers of keys.
template <class Math, int M, int N, int count>
INLINE void products_of_columns(const float* queries, int64_t steps, const float* columns, Register (*sum)[N]) {
  if constexpr (count == 1) {
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = Register{};
    for (int64_t from = 0; from < steps; from += chains) {
      Register keys[N];
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) keys[j] = load_register(columns + from * key_tile + j * register_lanes);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const Register part = Math::broadcast(queries + i * steps + from);
#pragma GCC unroll 8
        for (int j = 0; j < N; ++j) sum[i][j] = Math::multiply_add(part, keys[j], sum[i][j]);
      }
    }
  } else {
    Register more[M][N];
    products_of_columns<Math, M, N, count / 2>(queries, steps, columns, sum);
    products_of_columns<Math, M, N, count / 2>(queries + count / 2, steps, columns + count / 2 * key_tile, more);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] += more[i][j];
  }
}
template <class Math, int M, int N>
static void score_columns(const float* queries, int64_t steps, const float* columns, int64_t live, float* scores) {
  for (int64_t k = 0; k < live; k += N * register_lanes) {
    Register sum[M][N];
    products_of_columns<Math, M, N, chains>(queries, steps, columns + k, sum);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) store(scores + i * key_tile + k + j * register_lanes, sum[i][j]);
  }
}

// c[M][N registers] += a[M][depth] · b[depth][N registers]: one chain of multiply-adds an output.
template <class Math, int M, int N>
INLINE void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  Register sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = load_register(c + i * c_stride + j * register_lanes);
  for (int64_t k = 0; k < depth; ++k) {
    Register right[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) right[j] = load_register(b + k * b_stride + j * register_lanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Register left = Math::broadcast(a + i * a_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = Math::multiply_add(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * register_lanes, sum[i][j]);
}

// M rows times all columns, N registers of them at a time, and the rest one by one.
template <class Math, int M, int N>
INLINE void multiply_rows(int64_t columns, int64_t depth, const float* a, int64_t a_stride, const float* b, float* c) {
  int64_t j = 0;
  for (; j + N * register_lanes <= columns; j += N * register_lanes) multiply_block<Math, M, N>(a, a_stride, b + j, columns, c + j, columns, depth);
  for (; j < columns; j += register_lanes) multiply_block<Math, M, 1>(a, a_stride, b + j, columns, c + j, columns, depth);
}

// c[rows][columns] += a[rows][depth] · b[depth][columns], columns a multiple of 16.
template <class Math>
static void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_stride, const float* b, float* c) {
  by_blocks<value_rows>(rows, [&](auto block, int64_t i) ALWAYS_INLINE {
    constexpr int registers = block() == 1 ? lone_registers : value_registers;
    multiply_rows<Math, block(), registers>(columns, depth, a + i * a_stride, a_stride, b, c + i * columns);
  });
}

// tanh with a relative error below 1e-6: its series near 0, from eˣ elsewhere.
INLINE float hyperbolic_tangent(float x) {
  const float z = x * x, a = std::abs(x);
  const float near = x * (1.0f + z * (-1.0f / 3.0f + z * (2.0f / 15.0f + z * (-17.0f / 315.0f))));
  const float far = std::copysign(1.0f - 2.0f / (exponential(2.0f * a) + 1.0f), x);
  return a < 0.25f ? near : far;
}

// The states of `count` online softmaxes, one a (head, pair): unnormalised outputs [count][width], sums of weights [count][lanes], and the
// highest score [count] that both are relative to.
struct States {
  float *out, *weights, *highest;

  INLINE_METHOD static int64_t size(int64_t count, int64_t width) { return count * (width + lanes + 1); }
  INLINE_METHOD static States at(float* memory, int64_t count, int64_t width) {
    return {memory, memory + count * width, memory + count * (width + lanes)};
  }
  INLINE_METHOD void clear(int64_t count, int64_t width) const {
    zero(out, count * (width + lanes));
    for (int64_t i = 0; i < count; ++i) highest[i] = minus_infinity;
  }
};

// Merge a section's states into those of the sections before it. Where either is of nothing, the other stays as it is, bit for bit.
static void merge(const States& all, const States& section, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const float before = all.highest[i], here = section.highest[i], now = most(before, here);
    const float shrink = before == minus_infinity ? 0.0f : exponential(before - now);
    const float weight = here == minus_infinity ? 0.0f : exponential(here - now);
    for (int64_t j = 0; j < width; ++j) all.out[i * width + j] = all.out[i * width + j] * shrink + section.out[i * width + j] * weight;
    for (int64_t j = i * lanes; j < (i + 1) * lanes; ++j) all.weights[j] = all.weights[j] * shrink + section.weights[j] * weight;
    all.highest[i] = now;
  }
}

// Scores of one query over the first `live` keys of a tile as softmax takes them; −∞ where the query sees nothing, which is before `first`
// and after `last` of the tile. Returns the highest.
INLINE float prepare_scores(float* scores, int64_t live, int64_t first, int64_t last, float scale, float softcap) {
  const int64_t vectors = live / lanes;
  Lanes score[key_tile / lanes];
  for (int i = 0; i < vectors; ++i) score[i] = load(scores + i * lanes) * all_lanes(scale);
  if (softcap > 0.0f) {
    for (int i = 0; i < vectors; ++i) store(scores + i * lanes, score[i]);
    for (int64_t k = 0; k < live; ++k) scores[k] = hyperbolic_tangent(scores[k] / softcap) * softcap;
    for (int i = 0; i < vectors; ++i) score[i] = load(scores + i * lanes);
  }
  if (first > 0 || last < live - 1) {
    const auto from = static_cast<int32_t>(most(first, int64_t{0})), to = static_cast<int32_t>(least(last, key_tile));
    for (int i = 0; i < vectors; ++i)
      for (int part = 0; part < num_parts; ++part) {
        Integers key;
        for (int lane = 0; lane < register_lanes; ++lane) key[lane] = static_cast<int32_t>(i * lanes + part * register_lanes + lane);
        Register& seen = score[i].part[part];
        seen = (key >= from) & (key <= to) ? seen : splat(minus_infinity);
      }
  }
  Lanes highest = all_lanes(minus_infinity);
  for (int i = 0; i < vectors; ++i) {
    store(scores + i * lanes, score[i]);
    highest = largest(score[i], highest);
  }
  return largest_of(highest);
}

// Scores become weights relative to `highest`, as `Math` rounds them, exactly 0 for what is not seen; their sums are added to what `shrink`
// leaves of those of the tiles before.
template <class Math>
INLINE void weigh(float* scores, int64_t live, float highest, float shrink, float* sums) {
  Lanes sum = load(sums) * all_lanes(shrink);
  for (int64_t k = 0; k < live; k += lanes) {
    const Lanes score = load(scores + k);
    const Lanes weight = replace(Math::round_weights(exponentials(score - all_lanes(highest))), minus_infinity, score, Lanes{});
    store(scores + k, weight);
    sum = sum + weight;
  }
  store(sums, sum);
  Math::pack_weights(scores, live);
}

// Keys that a token sees, by position in its row.
struct Seen {
  int64_t first, last;
};
INLINE Seen seen_by(const AttentionCall& call, int64_t token) {
  const int64_t position = call.positions[token];
  return {call.window > 0 ? most(int64_t{0}, position - call.window + 1) : 0, position};
}

// A row's drafted nodes as a tree. A node lies in the cache where it would in a chain, the first one at entry `start`; its position is its
// depth. Packed token t is node t − begin; nodes that were fed in earlier passes have no token, and `begin` then lies before the row's.
struct Tree {
  int64_t begin, start;
  const int32_t* parents;
};
constexpr int64_t no_tree = INT64_MAX;

INLINE Tree tree_of(const AttentionCall& call, const AttentionUnit& unit) {
  if (!call.parents) return {no_tree, no_tree, nullptr};
  const int64_t first = call.node_indptr[unit.row], count = call.node_indptr[unit.row + 1] - first, begin = call.indptr[unit.row + 1] - count;
  const int32_t* parents = call.parents + first;
  for (int64_t node = 0; node < unit.token_end - begin; ++node)
    if (parents[node] != node - 1) return {begin, call.text_lens[unit.row], parents};
  return {no_tree, no_tree, nullptr};
}

// 32-bit entries that a key takes: of an odd size the last pair is half zeros.
template <class Math>
INLINE_METHOD int64_t key_steps(const AttentionCall& call) {
  return whole_lanes((call.key_size + Math::grain - 1) / Math::grain);
}

// The memory of a unit, in what `attend` has found for it; `zeros` [steps] stands for keys that are not there.
struct Memory {
  float *query, *quads, *zeros, *staged, *columns, *values, *scores, *drafted;
  States section, all;

  template <class Math>
  INLINE_METHOD static Memory at(float* memory, const AttentionCall& call, int64_t heads, int64_t pairs) {
    const int64_t steps = key_steps<Math>(call), width = whole_lanes(call.value_size), states = heads * pairs;
    Memory m{};
    const auto take = [&](int64_t size) ALWAYS_INLINE {
      float* const taken = memory;
      memory += whole_lanes(size);
      return taken;
    };
    m.query = take(states * steps);
    m.quads = take(pairs <= few_pairs ? states * steps * chains : 0);
    m.zeros = take(steps);
    m.staged = take(key_tile * most(steps, width));
    m.columns = take(steps * key_tile);
    m.values = take(key_tile * width);
    m.scores = take((pairs <= few_pairs ? states : pairs) * key_tile);
    m.drafted = take(pairs * key_tile);
    m.section = States::at(take(States::size(states, width)), states, width);
    m.all = States::at(take(States::size(states, width)), states, width);
    return m;
  }
};

// Addresses of the first head's keys and values at a tile's positions; null where the row has no such key.
struct TileRows {
  const char *keys[key_tile], *values[key_tile];
};

// The chunk to prefetch next: 16 rows of one head are a chunk, and a tile's are counted from its first key on: keys, values, then keys of
// the next tile. These are its parts 0, 1 and 2.
struct PrefetchCursor {
  int64_t chunk, part, k, head;
};
constexpr int64_t prefetch_distance = 4;  // chunks that are under way at least

// One unit's way through its tiles.
template <class Math>
struct Unit {
  const AttentionCall& call;
  const AttentionUnit& unit;
  Memory m;
  const int64_t group, pairs, steps, width;  // query heads a key/value head, (token, query head) pairs, entries of a key, of a value
  const bool is_few;
  const Tree tree;
  const int32_t* const table;
  Seen all;                        // what any token of the unit sees
  TileRows tile_rows[2];           // of a tile and of the one after it, in turn
  PrefetchCursor cursor{};
  int64_t path[key_tile];          // of one token: its drafted ancestors in the tile, as nodes; −1 elsewhere

  INLINE_METHOD Unit(const AttentionCall& c, const AttentionUnit& u, float* memory)
      : call(c), unit(u), m(Memory::at<Math>(memory, c, u.head_end - u.head_begin, (u.token_end - u.token_begin) * (c.num_heads / c.num_kv_heads))),
        group(c.num_heads / c.num_kv_heads), pairs((u.token_end - u.token_begin) * group), steps(key_steps<Math>(c)),
        width(whole_lanes(c.value_size)), is_few(pairs <= few_pairs), tree(tree_of(c, u)), table(c.block_table + u.row * c.table_stride), all(seen_by(c, u.token_begin)) {
    for (int64_t token = u.token_begin + 1; token < u.token_end; ++token) {
      const Seen seen = seen_by(c, token);
      all = {least(all.first, seen.first), most(all.last, seen.last)};
    }
  }

  INLINE_METHOD int64_t key_bytes() const { return Math::slot_bytes(call.key_size); }
  INLINE_METHOD int64_t value_bytes() const { return Math::slot_bytes(call.value_size); }
  INLINE_METHOD int64_t key_offset(int64_t head) const { return head * call.block_size * key_bytes(); }
  INLINE_METHOD int64_t value_offset(int64_t head) const { return head * call.block_size * value_bytes(); }

  // Entries `first` to `last` of the row, among key_tile from `start` on.
  void find(int64_t start, int64_t first, int64_t last, TileRows& found) const {
    int64_t block = start / call.block_size, offset = start % call.block_size;
    for (int64_t k = 0; k < key_tile; ++k) {
      const bool is_there = start + k >= first && start + k <= last;
      const int64_t row = is_there ? table[block] * call.num_kv_heads * call.block_size + offset : 0;
      found.keys[k] = is_there ? static_cast<const char*>(call.keys) + row * key_bytes() : nullptr;
      found.values[k] = is_there ? static_cast<const char*>(call.values) + row * value_bytes() : nullptr;
      if (++offset == call.block_size) ++block, offset = 0;
    }
  }
  // Keys of a tile up to the last that any token sees, in whole lanes: there is no work with those behind.
  INLINE_METHOD int64_t live_of(int64_t start) const { return least(key_tile, whole_lanes(all.last + 1 - start)); }
  INLINE_METHOD void find_tile(int64_t start, TileRows& found) const { find(start, all.first, least(all.last, tree.start - 1), found); }

  INLINE_METHOD const char* drafted_value(int64_t node) const {
    const int64_t entry = tree.start + node;
    const int64_t row = table[entry / call.block_size] * call.num_kv_heads * call.block_size + entry % call.block_size;
    return static_cast<const char*>(call.values) + row * value_bytes();
  }

  void load_queries() const {
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t at = (unit.token_begin + pair / group) * call.query_token_stride + (head * group + pair % group) * call.query_head_stride;
        const int64_t state = (head - unit.head_begin) * pairs + pair;
        Math::copy_row(static_cast<const char*>(call.query) + at * Math::bytes, call.key_size, steps, m.query + state * steps);
        if (is_few)
          for (int64_t step = 0; step < steps; step += chains)
            store(m.quads + (state * steps + step) * chains, same_quads(m.query + state * steps + step));
      }
  }

  // Prefetch rows, a few at a time: rows of one head lie apart, which no processor foresees.
  INLINE_METHOD static void prefetch_rows(const char* const* rows, int64_t count, int64_t offset, int64_t bytes) {
    for (int64_t k = 0; k < count; ++k)
      if (rows[k])
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[k] + offset + i);
  }

  // The next chunk that has not been prefetched, up to chunk `last`.
  INLINE_METHOD Prefetch next_prefetch(const TileRows& here, const TileRows& next, int64_t last) {
    if (cursor.chunk > last) return {};
    const TileRows& from = cursor.part < 2 ? here : next;
    const int64_t head = unit.head_begin + cursor.head;
    const Prefetch prefetch = cursor.part % 2 ? Prefetch{from.values + cursor.k, value_offset(head), (value_bytes() + 63) / 64}
                                          : Prefetch{from.keys + cursor.k, key_offset(head), (key_bytes() + 63) / 64};
    ++cursor.chunk;
    if (++cursor.head == unit.head_end - unit.head_begin) cursor.head = 0, cursor.k += lanes;
    if (cursor.k == key_tile) cursor.k = 0, ++cursor.part;
    return prefetch;
  }

  INLINE_METHOD float* scores_of(int64_t head) const { return m.scores + (is_few ? (head - unit.head_begin) * pairs * key_tile : 0); }
  INLINE_METHOD const float* queries_of(int64_t head) const { return m.query + (head - unit.head_begin) * pairs * steps; }

  // 16 keys of a head from the k-th on; zeros where there is none.
  INLINE_METHOD void find_rows(const TileRows& from, int64_t k, int64_t head, const float** rows) const {
    for (int64_t i = 0; i < lanes; ++i)
      rows[i] = from.keys[k + i] ? Math::row(from.keys[k + i] + key_offset(head), call.key_size, steps, m.staged + i * steps) : m.zeros;
  }
  // Scores of all pairs against these 16 keys; prefetches on the way.
  INLINE_METHOD void score_few(const TileRows& from, int64_t k, int64_t head, float* scores, const Prefetch& prefetch) const {
    const float* rows[lanes];
    find_rows(from, k, head, rows);
    for (int64_t pair = 0; pair < pairs;) {
      const float* const quads = m.quads + ((head - unit.head_begin) * pairs + pair) * steps * chains;
      const Prefetch then = pair == 0 ? prefetch : Prefetch{};
      float* const to = scores + pair * key_tile + k;
      const int64_t count = pairs - pair >= 8 ? 8 : pairs - pair >= 4 ? 4 : pairs - pair >= 2 ? 2 : 1;
      if (count == 8) products_of_rows<Math, 8>(rows, quads, steps, then, to);
      if (count == 4) products_of_rows<Math, 4>(rows, quads, steps, then, to);
      if (count == 2) products_of_rows<Math, 2>(rows, quads, steps, then, to);
      if (count == 1) products_of_rows<Math, 1>(rows, quads, steps, then, to);
      pair += count;
    }
  }
  // Against the first `live` keys of the tile.
  void score_many(const TileRows& from, int64_t live, int64_t head, const TileRows& ahead, int64_t ahead_head, float* scores) const {
    for (int64_t k = 0; k < key_tile; k += lanes) {
      prefetch_rows(ahead.keys + k, lanes, key_offset(ahead_head), key_bytes());
      if (k >= live) continue;
      const float* rows[lanes];
      find_rows(from, k, head, rows);
      for (int64_t entry = 0; entry < steps; entry += lanes) transpose(rows, entry, m.columns + k);
    }
    by_blocks<score_rows>(pairs, [&](auto rows, int64_t pair) ALWAYS_INLINE {
      constexpr int registers = rows() == 1 ? lone_registers : score_registers;
      score_columns<Math, rows(), registers>(queries_of(head) + pair * steps, steps, m.columns, live, scores + pair * key_tile);
    });
  }

  // The token's drafted ancestors, itself among them, by the lanes of their positions.
  void find_path(int64_t token, int64_t start) {
    for (int64_t k = 0; k < key_tile; ++k) path[k] = -1;
    int64_t lane = call.positions[token] - start;
    for (int64_t node = token - tree.begin; node >= 0; node = tree.parents[node], --lane)
      if (lane >= 0 && lane < key_tile) path[lane] = node;
  }

  // A drafted key's score takes the lane of its position, as in a chain. Drafted tokens are scored in tiles of their own.
  void score_drafts(int64_t start, int64_t head) {
    const int64_t count = unit.token_end - tree.begin;
    for (int64_t first = 0; first < count; first += key_tile) {
      TileRows drafted;
      find(tree.start + first, 0, tree.start + count - 1, drafted);
      score_many(drafted, least(key_tile, whole_lanes(count - first)), head, drafted, head, m.drafted);
      for (int64_t token = most(unit.token_begin, tree.begin); token < unit.token_end; ++token) {
        find_path(token, start);
        for (int64_t lane = 0; lane < key_tile; ++lane)
          if (path[lane] >= first && path[lane] < first + key_tile)
            for (int64_t pair = (token - unit.token_begin) * group; pair < (token - unit.token_begin + 1) * group; ++pair)
              scores_of(head)[pair * key_tile + lane] = m.drafted[pair * key_tile + path[lane] - first];
      }
    }
  }

  // Softmax of all pairs over a tile, online: scores become weights, and what was summed before shrinks where a higher score has come. 16
  // pairs at a time take each step together, so that none waits for another.
  INLINE_METHOD void soften(int64_t start, int64_t head) const {
    const int64_t live = live_of(start);
    for (int64_t first = 0; first < pairs; first += lanes) {
      const int64_t count = least(lanes, pairs - first), at = (head - unit.head_begin) * pairs + first;
      alignas(64) float before[lanes], now[lanes], shrink[lanes];
      store(before, all_lanes(minus_infinity));
      store(now, Lanes{});
      for (int64_t i = 0; i < count; ++i) {
        const Seen seen = seen_by(call, unit.token_begin + (first + i) / group);
        before[i] = m.section.highest[at + i];
        now[i] = most(before[i], prepare_scores(scores_of(head) + (first + i) * key_tile, live, seen.first - start, seen.last - start, call.scale, call.softcap));
        m.section.highest[at + i] = now[i];
      }
      store(shrink, replace(exponentials(load(before) - load(now)), minus_infinity, load(before), Lanes{}));
      for (int64_t i = 0; i < count; ++i) {
        weigh<Math>(scores_of(head) + (first + i) * key_tile, live, now[i], shrink[i], m.section.weights + (at + i) * lanes);
        if (shrink[i] == 1.0f) continue;
        float* const out = m.section.out + (at + i) * width;
        for (int64_t j = 0; j < width; ++j) out[j] *= shrink[i];
      }
    }
  }

  INLINE_METHOD bool is_seen_by_all(int64_t start) const {
    for (int64_t token = unit.token_begin; token < unit.token_end; ++token) {
      const Seen seen = seen_by(call, token);
      if (seen.first > start || seen.last < start + key_tile - 1) return false;
    }
    return start + key_tile <= tree.start;
  }

  // Rows of values, as many as an entry holds.
  INLINE_METHOD void load_values(const char* const* values, int64_t head, float* to) const {
    const char* rows[Math::grain];
    for (int64_t i = 0; i < Math::grain; ++i) rows[i] = values[i] ? values[i] + value_offset(head) : nullptr;
    Math::interleave(rows, call.value_size, to);
  }

  // out[M][value_columns] += weights[M][16] · values, in the order of `multiply`.
  template <int M>
  INLINE_METHOD void add_columns(const float* weights, const char* const* values, int64_t offset, float* out, const Prefetch& prefetch) const {
    constexpr int registers = value_columns / register_lanes;
    Register sum[M][registers];
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < registers; ++j) sum[i][j] = load_register(out + i * width + j * register_lanes);
    for (int64_t k = 0; k < lanes / Math::grain; ++k) {
      for (int i = 0; i < Math::grain; ++i) prefetch.fetch(k * Math::grain + i);
      Register right[registers];
      Math::entries(values + k * Math::grain, offset, right);
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) {
        const Register left = Math::broadcast(weights + i * key_tile + k);
#pragma GCC unroll 4
        for (int j = 0; j < registers; ++j) sum[i][j] = Math::multiply_add(left, right[j], sum[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < registers; ++j) store(out + i * width + j * register_lanes, sum[i][j]);
  }
  // Weights times the 16 values of a head from the k-th on, which every token sees.
  INLINE_METHOD void add_few(const TileRows& here, int64_t k, int64_t head, Prefetch prefetch) const {
    const float* weights = scores_of(head) + k / Math::grain;
    float* out = m.section.out + (head - unit.head_begin) * pairs * width;
    for (int64_t from = 0; from < width; from += value_columns, out += value_columns) {
      const int64_t offset = value_offset(head) + from * Math::bytes;
      for (int64_t pair = 0; pair < pairs;) {
        const float* const w = weights + pair * key_tile;
        float* const to = out + pair * width;
        const int64_t count = pairs - pair >= 4 ? 4 : pairs - pair >= 2 ? 2 : 1;
        if (count == 4) add_columns<4>(w, here.values + k, offset, to, prefetch);
        if (count == 2) add_columns<2>(w, here.values + k, offset, to, prefetch);
        if (count == 1) add_columns<1>(w, here.values + k, offset, to, prefetch);
        pair += count;
        prefetch.lines = 0;
      }
    }
  }

  // Weights times values. What some token of the unit does not see has the weight 0 for it, but 0 · NaN is NaN: where there is such a
  // value, and in trees, each token takes its own.
  void add_values(const TileRows& here, int64_t start, int64_t head, const TileRows& ahead, int64_t ahead_head) {
    const int64_t entries = live_of(start) / Math::grain, at = (head - unit.head_begin) * pairs;
    for (int64_t j = 0; j < key_tile / Math::grain; ++j) {
      prefetch_rows(ahead.values + j * Math::grain, Math::grain, value_offset(ahead_head), value_bytes());
      if (j < entries) load_values(here.values + j * Math::grain, head, m.values + j * width);
    }
    int64_t shared = entries;
    if (!is_seen_by_all(start)) {
      shared = tree.start == no_tree ? entries : least(most(tree.start - start, int64_t{0}) / Math::grain, entries);
      if (!Math::are_finite(m.values, shared * width)) shared = 0;
    }
    multiply<Math>(pairs, width, shared, scores_of(head), key_tile, m.values, m.section.out + at * width);
    if (shared == entries) return;
    for (int64_t token = unit.token_begin; token < unit.token_end; ++token) add_own_values(here, token, shared, start, head);
  }

  void add_own_values(const TileRows& here, int64_t token, int64_t shared, int64_t start, int64_t head) {
    const Seen seen = seen_by(call, token);
    const int64_t pair = (token - unit.token_begin) * group, at = (head - unit.head_begin) * pairs + pair;
    if (token >= tree.begin) find_path(token, start);
    for (int64_t j = shared; j < live_of(start) / Math::grain; ++j) {
      const char* values[Math::grain];
      bool is_seen = false;
      for (int64_t i = 0; i < Math::grain; ++i) {
        const int64_t lane = j * Math::grain + i, position = start + lane;
        const bool is_visible = position >= seen.first && position <= seen.last;
        values[i] = !is_visible ? nullptr : position < tree.start ? here.values[lane] : drafted_value(path[lane]);
        is_seen |= is_visible;
      }
      if (!is_seen) continue;
      load_values(values, head, m.staged);
      multiply<Math>(group, width, 1, scores_of(head) + pair * key_tile + j, key_tile, m.staged, m.section.out + at * width);
    }
  }

  // Head by head, each after all keys of the tile, with the next one's rows on their way.
  void attend_many(int64_t start, const TileRows& here, const TileRows& next) {
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
      const bool is_last = head + 1 == unit.head_end;
      const TileRows& ahead = is_last ? next : here;
      const int64_t ahead_head = is_last ? unit.head_begin : head + 1;
      score_many(here, live_of(start), head, ahead, ahead_head, m.scores);
      if (start + key_tile > tree.start) score_drafts(start, head);
      soften(start, head);
      add_values(here, start, head, ahead, ahead_head);
    }
  }

  // There is little to compute with each key, so keys and values are read as they lie, all heads of 16 positions one after another, and the
  // memory never rests: what is on its way runs ahead while softmax takes its time, and keys catch up.
  void attend_few(int64_t start, const TileRows& here, const TileRows& next) {
    const int64_t heads = unit.head_end - unit.head_begin, chunks = key_tile / lanes * heads, live = live_of(start);
    int64_t chunk = 0;
    for (int64_t k = 0; k < key_tile; k += lanes)
      for (int64_t head = unit.head_begin; head < unit.head_end; ++head, ++chunk)
        if (const Prefetch prefetch = next_prefetch(here, next, chunk + prefetch_distance + heads - chunk / (key_tile / lanes)); k < live)
          score_few(here, k, head, scores_of(head), prefetch);
        else
          prefetch.fetch_all();
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head) {
      const Prefetch prefetch = next_prefetch(here, next, chunk + prefetch_distance + head - unit.head_begin);
      prefetch.fetch_all();
      if (start + key_tile > tree.start) score_drafts(start, head);
      soften(start, head);
    }
    if (has_many_registers && Math::reads_in_place && call.value_size % value_columns == 0 && is_seen_by_all(start)) {
      if constexpr (Math::reads_in_place)
        for (int64_t k = 0; k < key_tile; k += lanes)
          for (int64_t head = unit.head_begin; head < unit.head_end; ++head, ++chunk) add_few(here, k, head, next_prefetch(here, next, chunk + prefetch_distance + heads));
    } else {
      for (int64_t head = unit.head_begin; head < unit.head_end; ++head) add_values(here, start, head, here, least(head + 1, unit.head_end - 1));
      if (cursor.part < 2) cursor = {2 * chunks, 2, 0, 0};  // these values have been read
    }
    cursor.chunk -= 2 * chunks;
    cursor.part -= 2;
  }

  void attend_section(int64_t begin, int64_t end) {
    m.section.clear(pairs * (unit.head_end - unit.head_begin), width);
    cursor = {};
    find_tile(begin, tile_rows[begin / key_tile % 2]);
    for (int64_t start = begin; start < end; start += key_tile) {
      const TileRows& here = tile_rows[start / key_tile % 2];
      TileRows& next = tile_rows[(start / key_tile + 1) % 2];
      find_tile(start + key_tile, next);
      if (is_few)
        attend_few(start, here, next);
      else
        attend_many(start, here, next);
    }
  }

  void write_out() const {
    for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t state = (head - unit.head_begin) * pairs + pair, query_head = head * group + pair % group;
        float parts[lanes];
        std::memcpy(parts, m.all.weights + state * lanes, sizeof parts);
        for (int64_t half = lanes / 2; half > 0; half /= 2)
          for (int64_t j = 0; j < half; ++j) parts[j] += parts[j + half];
        float total = parts[0];
        if (call.sinks) total += exponential(call.sinks[query_head] - m.all.highest[state]);
        Math::write_row(m.all.out + state * width, total, call.value_size,
                        static_cast<char*>(call.out) + ((unit.token_begin + pair / group) * call.num_heads + query_head) * call.value_size * Math::bytes);
      }
  }

  void attend() {
    const int64_t count = pairs * (unit.head_end - unit.head_begin);
    zero(m.zeros, steps);
    load_queries();
    const int64_t begin = most(all.first, unit.key_begin) / key_tile * key_tile, end = least(all.last + 1, unit.key_end);
    const int64_t first = begin / key_section * key_section;
    if (first + key_section >= end) {
      m.section = m.all;  // the only one
      attend_section(begin, end);
    } else {
      m.all.clear(count, width);
      for (int64_t section = first; section < end; section += key_section) {
        attend_section(most(begin, section), least(end, section + key_section));
        merge(m.all, m.section, count, width);
      }
    }
    if (unit.partial >= 0)
      std::memcpy(call.partials + unit.partial, m.all.out, static_cast<size_t>(States::size(count, width)) * sizeof(float));
    else
      write_out();
  }

  void combine(int64_t sections) const {
    const int64_t count = pairs * (unit.head_end - unit.head_begin);
    m.all.clear(count, width);
    for (int64_t i = 0; i < sections; ++i) merge(m.all, States::at(call.partials + unit.partial + i * States::size(count, width), count, width), count, width);
    write_out();
  }
};

}  // namespace
}  // namespace echelon
