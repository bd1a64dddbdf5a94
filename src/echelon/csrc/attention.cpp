#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

// Multiply-adds are fused where the processor can: always or never, so a query's bits do not depend on the queries beside it.
#pragma GCC optimize("fp-contract=fast")

namespace echelon {
namespace {

using F16 = float __attribute__((vector_size(64)));
using U16 = uint32_t __attribute__((vector_size(64)));

constexpr int64_t lanes = 16;
constexpr float minus_infinity = -__builtin_inff();

INLINE int64_t padded(int64_t n) { return (n + lanes - 1) / lanes * lanes; }
INLINE F16 splat(float x) { return F16{} + x; }

INLINE F16 load(const float* p) {
  F16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, F16 v) { std::memcpy(p, &v, sizeof v); }

// `size` values of storage, widened and filled up with zeros to full vectors.
template <Storage type>
INLINE void widen_row(const void* from, int64_t size, float scale, float* to) {
  using N = Number<type>;
  const auto* in = static_cast<const typename N::Stored*>(from);
  for (int64_t i = 0; i < size; ++i) to[i] = N::widen(in[i]) * scale;
  for (int64_t i = size; i < padded(size); ++i) to[i] = 0.0f;
}

// Exchange lanes that differ in bit `h` between vectors that differ in bit `h`: four of these transpose 16 × 16.
template <int h>
INLINE void exchange(F16* v) {
  U16 low, high;
  for (uint32_t lane = 0; lane < 16; ++lane) {
    low[lane] = lane & h ? 16 + lane - h : lane;
    high[lane] = lane & h ? 16 + lane : lane + h;
  }
  for (int i = 0; i < 16; ++i) {
    if (i & h) continue;
    const F16 a = v[i], b = v[i + h];
    v[i] = __builtin_shuffle(a, b, low);
    v[i + h] = __builtin_shuffle(a, b, high);
  }
}

// rows [key_tile][width] -> columns [width][key_tile].
INLINE void transpose(const float* rows, int64_t width, float* columns) {
  for (int64_t key = 0; key < key_tile; key += lanes)
    for (int64_t d = 0; d < width; d += lanes) {
      F16 v[lanes];
      for (int64_t i = 0; i < lanes; ++i) v[i] = load(rows + (key + i) * width + d);
      exchange<1>(v);
      exchange<2>(v);
      exchange<4>(v);
      exchange<8>(v);
      for (int64_t i = 0; i < lanes; ++i) store(columns + (d + i) * key_tile + key, v[i]);
    }
}

// c[M][N vectors] += a[M][depth] · b[depth][N vectors]: one chain of multiply-adds an output.
template <int M, int N>
INLINE void multiply_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride, int64_t depth) {
  F16 sum[M][N];
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sum[i][j] = load(c + i * c_stride + j * lanes);
  for (int64_t k = 0; k < depth; ++k) {
    F16 right[N];
    for (int j = 0; j < N; ++j) right[j] = load(b + k * b_stride + j * lanes);
    for (int i = 0; i < M; ++i) {
      const F16 left = splat(a[i * a_stride + k]);
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * lanes, sum[i][j]);
}

template <int N>
INLINE void multiply_rows(int64_t rows, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t c_stride,
                          int64_t depth) {
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) multiply_block<4, N>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth);
  for (; i < rows; ++i) multiply_block<1, N>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth);
}

// c[rows][columns] += a[rows][depth] · b[depth][columns], columns a multiple of 16.
INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_stride, const float* b, float* c) {
  int64_t j = 0;
  for (; j + 4 * lanes <= columns; j += 4 * lanes) multiply_rows<4>(rows, a, a_stride, b + j, columns, c + j, columns, depth);
  for (; j < columns; j += lanes) multiply_rows<1>(rows, a, a_stride, b + j, columns, c + j, columns, depth);
}

// tanh with a relative error below 1e-6: its series near 0, from eˣ elsewhere.
INLINE float hyperbolic_tangent(float x) {
  const float z = x * x, a = std::abs(x);
  const float near = x * (1.0f + z * (-1.0f / 3.0f + z * (2.0f / 15.0f + z * (-17.0f / 315.0f))));
  const float far = std::copysign(1.0f - 2.0f / (exponential(2.0f * a) + 1.0f), x);
  return a < 0.25f ? near : far;
}

// What softmax has come to for `count` (head, pair) places: unnormalised outputs [count][width], sums of weights [count][lanes], and the
// highest score [count] that both are relative to.
struct Sums {
  float *out, *weights, *highest;

  static int64_t size(int64_t count, int64_t width) { return count * (width + lanes + 1); }
  static Sums at(float* memory, int64_t count, int64_t width) {
    return {memory, memory + count * width, memory + count * (width + lanes)};
  }
};

INLINE void clear(const Sums& sums, int64_t count, int64_t width) {
  std::fill_n(sums.out, count * (width + lanes), 0.0f);
  std::fill_n(sums.highest, count, minus_infinity);
}

// What one unit works with; one a thread, kept.
struct Scratch {
  std::vector<float> memory;
  float *query, *rows, *columns, *values, *scores, *drafted, *section_sums, *all_sums;
  Sums section, all;
  std::vector<int64_t> path;

  void lay_out(int64_t heads, int64_t pairs, int64_t key_width, int64_t value_width) {
    const int64_t sizes[] = {heads * pairs * key_width,   key_tile * key_width,     key_tile * key_width, key_tile * value_width,
                             pairs * key_tile,            pairs * key_tile,     Sums::size(heads * pairs, value_width), Sums::size(heads * pairs, value_width)};
    float** places[] = {&query, &rows, &columns, &values, &scores, &drafted, &section_sums, &all_sums};
    int64_t total = 0;
    for (const int64_t size : sizes) total += padded(size);
    memory.resize(static_cast<size_t>(total));
    float* at = memory.data();
    for (int i = 0; i < 8; ++i) {
      *places[i] = at;
      at += padded(sizes[i]);
    }
    section = Sums::at(section_sums, heads * pairs, value_width);
    all = Sums::at(all_sums, heads * pairs, value_width);
  }
};

// Add a section's sums to those of the sections before it. Where either is of nothing, the other stays as it is, bit for bit.
INLINE void merge(const Sums& all, const Sums& section, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    const float before = all.highest[i], here = section.highest[i], now = std::max(before, here);
    const float shrink = before == minus_infinity ? 0.0f : exponential(before - now), weight = here == minus_infinity ? 0.0f : exponential(here - now);
    for (int64_t j = 0; j < width; ++j) all.out[i * width + j] = all.out[i * width + j] * shrink + section.out[i * width + j] * weight;
    for (int64_t j = 0; j < lanes; ++j) all.weights[i * lanes + j] = all.weights[i * lanes + j] * shrink + section.weights[i * lanes + j] * weight;
    all.highest[i] = now;
  }
}

// Softmax of one query over a tile, online: scores become weights, what was summed before shrinks by the returned factor. The query sees
// keys `first` to `last` of the tile; every other weight is exactly 0.
INLINE float softmax(float* scores, int64_t first, int64_t last, float softcap, float* highest, float* sums) {
  if (softcap > 0.0f)
    for (int64_t k = 0; k < key_tile; ++k) scores[k] = hyperbolic_tangent(scores[k] / softcap) * softcap;
  float most[lanes];
  for (int64_t j = 0; j < lanes; ++j) most[j] = minus_infinity;
  for (int64_t k = 0; k < key_tile; k += lanes)
    for (int64_t j = 0; j < lanes; ++j) {
      const bool is_visible = (k + j >= first) & (k + j <= last);
      const float score = is_visible ? scores[k + j] : minus_infinity;
      most[j] = score > most[j] ? score : most[j];
    }
  float now = *highest;
  for (int64_t j = 0; j < lanes; ++j) now = most[j] > now ? most[j] : now;
  const float shrink = *highest == minus_infinity ? 0.0f : exponential(*highest - now);
  *highest = now;
  for (int64_t j = 0; j < lanes; ++j) sums[j] *= shrink;
  for (int64_t k = 0; k < key_tile; k += lanes)
    for (int64_t j = 0; j < lanes; ++j) {
      const bool is_visible = (k + j >= first) & (k + j <= last);
      const float weight = is_visible ? exponential(scores[k + j] - now) : 0.0f;
      scores[k + j] = weight;
      sums[j] += weight;
    }
  return shrink;
}

template <Storage type>
INLINE void load_queries(const AttentionCall& call, const AttentionUnit& unit, int64_t group, int64_t width, Scratch& s) {
  const int64_t pairs = (unit.token_end - unit.token_begin) * group;
  for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t at = (unit.token_begin + pair / group) * call.query_token_stride + (head * group + pair % group) * call.query_head_stride;
      const auto* from = static_cast<const typename Number<type>::Stored*>(call.query) + at;
      widen_row<type>(from, call.key_size, call.scale, s.query + ((head - unit.head_begin) * pairs + pair) * width);
    }
}

// `count` (at most key_tile) consecutive places of a row, from `place` on, of keys or values of one head, in float32.
template <Storage type>
INLINE void load_places(const AttentionCall& call, int64_t row, int64_t head, int64_t place, int64_t count, const void* storage, int64_t size,
                        float* to) {
  const int32_t* table = call.block_table + row * call.table_stride;
  for (int64_t k = 0; k < count; ++k) {
    const int64_t slot = table[(place + k) / call.block_size] * call.block_size + (place + k) % call.block_size;
    const auto* from = static_cast<const typename Number<type>::Stored*>(storage) + (slot * call.num_kv_heads + head) * size;
    widen_row<type>(from, size, 1.0f, to + k * padded(size));
  }
}

// A tile of keys or values of one head; places before `first` and after `last` become 0 and are not read.
template <Storage type>
INLINE void load_tile(const AttentionCall& call, int64_t row, int64_t head, int64_t start, int64_t first, int64_t last, const void* storage,
                      int64_t size, float* to) {
  const int64_t width = padded(size), begin = std::clamp<int64_t>(first - start, 0, key_tile), end = std::clamp<int64_t>(last + 1 - start, begin, key_tile);
  std::fill_n(to, begin * width, 0.0f);
  load_places<type>(call, row, head, start + begin, end - begin, storage, size, to + begin * width);
  std::fill_n(to + end * width, (key_tile - end) * width, 0.0f);
}

template <Storage type>
INLINE void write_out(const AttentionCall& call, const AttentionUnit& unit, int64_t group, int64_t width, const Sums& sums) {
  using N = Number<type>;
  const int64_t pairs = (unit.token_end - unit.token_begin) * group;
  for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t place = (head - unit.head_begin) * pairs + pair, query_head = head * group + pair % group;
      float parts[lanes];
      std::copy_n(sums.weights + place * lanes, lanes, parts);
      for (int64_t half = lanes / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) parts[j] += parts[j + half];
      float total = parts[0];
      if (call.sinks) total += std::exp(call.sinks[query_head] - sums.highest[place]);
      auto* to = static_cast<typename N::Stored*>(call.out) + ((unit.token_begin + pair / group) * call.num_heads + query_head) * call.value_size;
      for (int64_t i = 0; i < call.value_size; ++i) to[i] = N::narrow(sums.out[place * width + i] / total);
    }
}

// Keys that a token sees, within its row.
struct Seen {
  int64_t first, last;
};
INLINE Seen seen_by(const AttentionCall& call, int64_t token) {
  const int64_t position = call.positions[token];
  return {call.window > 0 ? std::max<int64_t>(0, position - call.window + 1) : 0, position};
}

// A row's drafted tokens as a tree: packed tokens from `begin` on, the first of them at position `start` of the text. A token's own
// place in the cache is that of a chain; its position is its depth.
struct Tree {
  int64_t begin, start, first_place;
};
constexpr int64_t no_tree = INT64_MAX;

INLINE Tree tree_of(const AttentionCall& call, const AttentionUnit& unit) {
  if (!call.parents) return {no_tree, no_tree, 0};
  const int64_t row_begin = call.indptr[unit.row], start = call.text_lens[unit.row], begin = row_begin + start - call.positions[row_begin];
  for (int64_t token = begin; token < unit.token_end; ++token)
    if (call.parents[token] != token - 1) return {begin, start, start};
  return {no_tree, no_tree, 0};
}

// The token's drafted ancestors, itself the last; ancestors have lower numbers.
INLINE void find_path(const AttentionCall& call, const Tree& tree, int64_t token, std::vector<int64_t>& path) {
  path.resize(static_cast<size_t>(std::max<int64_t>(0, call.positions[token] - tree.start + 1)));
  for (size_t depth = path.size(); depth-- > 0; token = call.parents[token]) path[depth] = token;
}

#define ALWAYS_INLINE __attribute__((always_inline))
#define METHOD ALWAYS_INLINE inline

// What one (unit, head) does with one tile of positions.
template <Storage type>
struct Tile {
  const AttentionCall& call;
  const AttentionUnit& unit;
  const Tree& tree;
  Scratch& s;
  int64_t head, start, group, key_width, value_width;

  METHOD int64_t pairs() const { return (unit.token_end - unit.token_begin) * group; }
  METHOD int64_t place() const { return (head - unit.head_begin) * pairs(); }
  METHOD bool holds_drafts() const { return start + key_tile > tree.start; }

  METHOD void score(float* scores) const {
    transpose(s.rows, key_width, s.columns);
    std::fill_n(scores, pairs() * key_tile, 0.0f);
    multiply(pairs(), key_tile, key_width, s.query + place() * key_width, key_width, s.columns, scores);
  }

  METHOD void soften() const {
    for (int64_t pair = 0; pair < pairs(); ++pair) {
      const Seen seen = seen_by(call, unit.token_begin + pair / group);
      float* scores = s.scores + pair * key_tile;
      if (seen.last < start || seen.first >= start + key_tile) {  // nothing to see: everything stays as it is
        std::fill_n(scores, key_tile, 0.0f);
        continue;
      }
      const int64_t at = place() + pair;
      const float shrink = softmax(scores, seen.first - start, seen.last - start, call.softcap, s.section.highest + at, s.section.weights + at * lanes);
      for (int64_t i = 0; i < value_width; ++i) s.section.out[at * value_width + i] *= shrink;
    }
  }

  // Drafted tokens of the tree in tiles of their own, in order of their numbers.
  template <typename Use>
  METHOD void for_drafts(const void* storage, int64_t size, float* to, Use use) const {
    for (int64_t first = tree.begin; first < unit.token_end; first += key_tile) {
      const int64_t count = std::min(key_tile, unit.token_end - first);
      load_places<type>(call, unit.row, head, tree.first_place + first - tree.begin, count, storage, size, to);
      std::fill_n(to + count * padded(size), (key_tile - count) * padded(size), 0.0f);
      use(first, first + count);
    }
  }

  // For every token of the unit that sees drafts in this tile: `use(token, position, ancestor)` in order of position.
  template <typename Use>
  METHOD void for_ancestors(int64_t first, int64_t end, Use use) const {
    for (int64_t token = std::max(unit.token_begin, tree.begin); token < unit.token_end; ++token) {
      find_path(call, tree, token, s.path);
      const Seen seen = seen_by(call, token);
      const int64_t from = std::max({start, seen.first, tree.start}), to = std::min(seen.last, start + key_tile - 1);
      for (int64_t position = from; position <= to; ++position) {
        const int64_t ancestor = s.path[position - tree.start];
        if (ancestor >= first && ancestor < end) use(token, position, ancestor);
      }
    }
  }

  // A drafted key's score takes the lane of its position, as in a chain.
  METHOD void place_draft_scores() const {
    for_drafts(call.keys, call.key_size, s.rows, [&](int64_t first, int64_t end) ALWAYS_INLINE {
      score(s.drafted);
      for_ancestors(first, end, [&](int64_t token, int64_t position, int64_t ancestor) ALWAYS_INLINE {
        for (int64_t pair = (token - unit.token_begin) * group; pair < (token - unit.token_begin + 1) * group; ++pair)
          s.scores[pair * key_tile + position - start] = s.drafted[pair * key_tile + ancestor - first];
      });
    });
  }

  // After the values before the tree, which have the lower lanes: one multiply-add each, in order of position.
  METHOD void add_draft_values() const {
    for_drafts(call.values, call.value_size, s.values, [&](int64_t first, int64_t end) ALWAYS_INLINE {
      for_ancestors(first, end, [&](int64_t token, int64_t position, int64_t ancestor) ALWAYS_INLINE {
        for (int64_t pair = (token - unit.token_begin) * group; pair < (token - unit.token_begin + 1) * group; ++pair)
          multiply(1, value_width, 1, s.scores + pair * key_tile + position - start, key_tile, s.values + (ancestor - first) * value_width,
                   s.section.out + (place() + pair) * value_width);
      });
    });
  }

  // Keys `first` to `last` of the row are seen by some token of the unit.
  METHOD void attend(int64_t first, int64_t last) const {
    last = std::min(last, tree.start - 1);
    load_tile<type>(call, unit.row, head, start, first, last, call.keys, call.key_size, s.rows);
    score(s.scores);
    if (holds_drafts()) place_draft_scores();
    soften();
    load_tile<type>(call, unit.row, head, start, first, last, call.values, call.value_size, s.values);
    multiply(pairs(), value_width, key_tile, s.scores, key_tile, s.values, s.section.out + place() * value_width);
    if (holds_drafts()) add_draft_values();
  }
};

template <Storage type>
INLINE void attend_type(const AttentionCall& call, const AttentionUnit& unit, Scratch& s) {
  const int64_t group = call.num_heads / call.num_kv_heads, pairs = (unit.token_end - unit.token_begin) * group;
  const int64_t heads = unit.head_end - unit.head_begin, key_width = padded(call.key_size), value_width = padded(call.value_size);
  s.lay_out(heads, pairs, key_width, value_width);
  clear(s.all, heads * pairs, value_width);
  load_queries<type>(call, unit, group, key_width, s);
  const Tree tree = tree_of(call, unit);
  Seen all = seen_by(call, unit.token_begin);
  for (int64_t token = unit.token_begin + 1; token < unit.token_end; ++token) {
    const Seen seen = seen_by(call, token);
    all = {std::min(all.first, seen.first), std::max(all.last, seen.last)};
  }
  const int64_t begin = std::max(all.first, unit.key_begin), end = std::min(all.last + 1, unit.key_end);
  for (int64_t section = begin / key_section * key_section; section < end; section += key_section) {
    clear(s.section, heads * pairs, value_width);
    const int64_t first = std::max(begin / key_tile * key_tile, section), last = std::min(end, section + key_section);
    for (int64_t start = first; start < last; start += key_tile)
      for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
        Tile<type>{call, unit, tree, s, head, start, group, key_width, value_width}.attend(all.first, all.last);
    merge(s.all, s.section, heads * pairs, value_width);
  }
  if (unit.partial)
    std::copy_n(s.all_sums, Sums::size(heads * pairs, value_width), unit.partial);
  else
    write_out<type>(call, unit, group, value_width, s.all);
}

template <Storage type>
INLINE void combine_type(const AttentionCall& call, const AttentionUnit& unit, int64_t count, Scratch& s) {
  const int64_t group = call.num_heads / call.num_kv_heads, pairs = (unit.token_end - unit.token_begin) * group;
  const int64_t places = pairs * (unit.head_end - unit.head_begin), width = padded(call.value_size);
  s.lay_out(unit.head_end - unit.head_begin, pairs, padded(call.key_size), width);
  clear(s.all, places, width);
  for (int64_t i = 0; i < count; ++i) merge(s.all, Sums::at(unit.partial + i * Sums::size(places, width), places, width), places, width);
  write_out<type>(call, unit, group, width, s.all);
}

FOR_EVERY_PROCESSOR void attend_float32(const AttentionCall& call, const AttentionUnit& unit, Scratch& s) {
  attend_type<Storage::float32>(call, unit, s);
}
FOR_EVERY_PROCESSOR void combine_float32(const AttentionCall& call, const AttentionUnit& unit, int64_t count, Scratch& s) {
  combine_type<Storage::float32>(call, unit, count, s);
}
FOR_EVERY_PROCESSOR void attend_bfloat16(const AttentionCall& call, const AttentionUnit& unit, Scratch& s) {
  attend_type<Storage::bfloat16>(call, unit, s);
}
FOR_EVERY_PROCESSOR void combine_bfloat16(const AttentionCall& call, const AttentionUnit& unit, int64_t count, Scratch& s) {
  combine_type<Storage::bfloat16>(call, unit, count, s);
}
FOR_EVERY_PROCESSOR void attend_float16(const AttentionCall& call, const AttentionUnit& unit, Scratch& s) {
  attend_type<Storage::float16>(call, unit, s);
}
FOR_EVERY_PROCESSOR void combine_float16(const AttentionCall& call, const AttentionUnit& unit, int64_t count, Scratch& s) {
  combine_type<Storage::float16>(call, unit, count, s);
}

thread_local Scratch scratch;

}  // namespace

void attend(const AttentionCall& call, const AttentionUnit& unit) {
  if (call.type == Storage::float32) return attend_float32(call, unit, scratch);
  if (call.type == Storage::bfloat16) return attend_bfloat16(call, unit, scratch);
  attend_float16(call, unit, scratch);
}

int64_t partial_size(const AttentionCall& call, const AttentionUnit& unit) {
  const int64_t heads = (unit.head_end - unit.head_begin) * (call.num_heads / call.num_kv_heads);
  return Sums::size((unit.token_end - unit.token_begin) * heads, padded(call.value_size));
}

void combine(const AttentionCall& call, const AttentionUnit& unit, int64_t count) {
  if (call.type == Storage::float32) return combine_float32(call, unit, count, scratch);
  if (call.type == Storage::bfloat16) return combine_bfloat16(call, unit, count, scratch);
  combine_float16(call, unit, count, scratch);
}

}  // namespace echelon
