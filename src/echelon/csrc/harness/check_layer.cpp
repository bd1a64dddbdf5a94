#include <omp.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <optional>
#include <thread>

#include "../layer/layer.h"
#include "../isa.h"
#include "harness.h"

namespace harness {
namespace {

using namespace echelon;

// Room for so many numbers of a type, filled.
struct Numbers {
  Bytes bytes;
  Numbers(Random& random, int64_t count, Storage type) : bytes(count * linear::size_of(type)) { fill(random, bytes.as(), count, type); }
};

// Pack a weight [N, K] of numbers, rounded to integers where it shall be.
void pack_columns(const char* numbers, const linear::Weight& w, char* packed) {
  if (!w.integers.bits) return linear::pack_tiles(numbers, w.depth, 1, w.columns, w.depth, w.type, 0, linear::tiles(w.columns), packed);
  const int64_t groups = w.integers.bits == 4 ? w.depth / w.integers.group : 1;
  std::vector<uint8_t> values(w.columns * w.depth);
  std::vector<float> scales(w.columns * groups);
  for (int64_t n = 0; n < w.columns; ++n)
    linear::round_weight(numbers + n * w.depth * linear::size_of(w.type), w.depth, w.type, w.integers, values.data() + n * w.depth, &scales[n * groups]);
  linear::pack_tiles({values.data(), scales.data(), nullptr}, w, 0, linear::tiles(w.columns), packed);
}

// A projection from `depth` to `columns` numbers, or by integers; sometimes with a bias.
struct RandomProjection {
  Numbers weight, bias;
  Bytes packed;
  Projection projection;

  RandomProjection(Random& random, int64_t columns, int64_t depth, Storage type, linear::Integers integers)
      : weight(random, columns * depth, type),
        bias(random, columns, Storage::float32),
        packed(linear::bytes_of({nullptr, columns, depth, type, integers})) {
    const linear::Weight shape{packed.as(), columns, depth, type, integers};
    pack_columns(weight.bytes.as(), shape, packed.as());
    projection = {shape, between(random, 0, 1) ? bias.bytes.as<float>() : nullptr};
  }
};

// Of the columns of a projection `count` from `first` on, packed by themselves.
struct CutProjection {
  Bytes packed;
  Projection projection;

  CutProjection(const RandomProjection& whole, int64_t first, int64_t count)
      : packed(linear::bytes_of({nullptr, count, whole.projection.weight.depth, whole.projection.weight.type, whole.projection.weight.integers})) {
    linear::Weight shape = whole.projection.weight;
    shape.columns = count, shape.data = packed.as();
    const char* const numbers = whole.weight.bytes.as() + first * shape.depth * linear::size_of(shape.type);
    pack_columns(numbers, shape, packed.as());
    projection = {shape, whole.projection.bias ? whole.projection.bias + first : nullptr};
  }
};

// One row of tokens after `before` others, in blocks in reverse order.
struct Row {
  int64_t before, tokens, block, num_blocks;
  std::vector<int32_t> positions, indptr, table, text_lens;
  std::vector<int64_t> slots;

  // Some are more than one pass of linear layers; others have so few tokens after so many that keys are split among workers.
  explicit Row(Random& random, bool is_long)
      : before(is_long ? between(random, 600, 1200) : between(random, 0, 30)),
        tokens(is_long ? between(random, 1, 3) : between(random, 0, 9) ? between(random, 1, 40) : between(random, 500, 600)),
        block(between(random, 1, 20)) {
    num_blocks = (before + tokens + block - 1) / block;
    for (int64_t i = 0; i < num_blocks; ++i) table.push_back(static_cast<int32_t>(num_blocks - 1 - i));
    for (int64_t i = 0; i < tokens; ++i) {
      const int64_t position = before + i;
      positions.push_back(static_cast<int32_t>(position));
      slots.push_back(table[static_cast<size_t>(position / block)] * block + position % block);
    }
    indptr = {0, static_cast<int32_t>(tokens)};
    text_lens = {static_cast<int32_t>(before + tokens)};
  }
};

// A layer in one call, by so many threads.
void run_whole(const LayerCall& call, const Division& division, int64_t parts) {
  LayerRun whole(call, division, parts);
  const Bytes memory(whole.bytes());
  int64_t num_threads = 0;
#pragma omp parallel num_threads(static_cast<int>(parts))
  {
#pragma omp atomic
    ++num_threads;
#pragma omp barrier
    if (num_threads == parts) whole.run({omp_get_thread_num(), parts}, memory.as());
  }
  expect(num_threads == parts, "as many threads as asked for");
}

// The layer part by part, as the framework would call them.
void by_parts(const LayerCall& call) {
  const DecoderLayer& l = call.layer;
  AttentionCall a = call.attention;
  const Storage type = a.type;
  const int64_t size = linear::size_of(type), tokens = call.tokens, width = call.width, inner = l.gate.weight.columns;
  const linear::Family& family = linear::family(active_features(), type, l.query.weight.integers.bits, call.tokens);
  const auto norm = [&](const RmsNorm& n, const void* x, void* out, int64_t rows) {
    rms_norm(type, {x, n.size}, n.weight, out, 0, rows, n.size, n.eps, n.how);
  };
  const auto project = [&](const Projection& p, const void* x, void* out) {
    run({x, tokens, p.weight.depth, p.weight, p.bias, Activation::none, out, p.weight.columns, false}, family, 1);
  };
  const auto room = [&](int64_t of_a_token) { return Bytes(tokens * of_a_token * size); };
  const Bytes normed = room(width), added = room(width), middle = room(width), gate = room(inner), up = room(inner), active = room(inner);
  norm(l.input_norm, call.hidden, normed.as(), tokens);
  const auto heads = [&](const Projection& p, const RmsNorm& n, int64_t count, void* out) {
    const Bytes plain = room(count * a.key_size), own = room(count * a.key_size);
    project(p, normed.as(), plain.as());
    if (n.weight) norm(n, plain.as(), own.as(), tokens * count);
    rotate(type, call.angle_type, n.weight ? own.as() : plain.as(), count * a.key_size, a.key_size, call.cos, call.sin, out, 0, tokens, count,
           a.key_size, call.rotary);
  };
  const Bytes query = room(a.num_heads * a.key_size), key = room(a.num_kv_heads * a.key_size), value = room(a.num_kv_heads * a.value_size),
              attended = room(a.num_heads * a.value_size);
  heads(l.query, l.query_norm, a.num_heads, query.as());
  heads(l.key, l.key_norm, a.num_kv_heads, key.as());
  project(l.value, normed.as(), value.as());
  write_slots(type, key.as(), a.num_kv_heads * a.key_size, a.key_size, a.key_size, call.slots, 0, tokens, call.keys);
  write_slots(type, value.as(), a.num_kv_heads * a.value_size, a.value_size, a.value_size, call.slots, 0, tokens, call.values);
  a.query = query.as(), a.query_head_stride = a.key_size, a.query_token_stride = a.num_heads * a.key_size, a.out = attended.as();
  const Division division = divide(a, 1);
  const Bytes partials(division.num_partials * 4);
  a.partials = partials.as<float>();
  for (const AttentionUnit& unit : division.units) attend(a, unit);
  for (const auto& [unit, count] : division.combinations) combine(a, unit, count);
  project(l.output, attended.as(), added.as());
  add(type, call.hidden, added.as(), middle.as(), tokens * width);
  norm(l.mlp_norm, middle.as(), normed.as(), tokens);
  project(l.gate, normed.as(), gate.as());
  project(l.up, normed.as(), up.as());
  activate(type, l.activation, {gate.as(), inner}, {up.as(), inner}, active.as(), 0, tokens, inner);
  project(l.down, active.as(), added.as());
  add(type, middle.as(), added.as(), call.out, tokens * width);
}

// The projections of a random layer.
struct RandomProjections {
  const RandomProjection &query, &key, &value, &output, &gate, &up, &down;
};

// One of `size` ranks that share a layer: its columns, and heads of keys and values of its own.
struct RankOfLayer {
  int64_t first_head, num_heads;  // of keys and values
  LayerShare share;
  CutProjection query, key, value, output, gate, up, down;
  DecoderLayer layer;
  Bytes keys, values, out;

  static int64_t at(int64_t columns, int64_t rank, int64_t size) { return columns * rank / size; }

  RankOfLayer(const LayerCall& call, const RandomProjections& p, int64_t rank, int64_t size)
      : first_head(at(call.attention.num_kv_heads, rank, size)),
        num_heads(at(call.attention.num_kv_heads, rank + 1, size) - first_head),
        share{{first_head * group(call) * call.attention.value_size, call.attention.num_heads * call.attention.value_size},
              {at(call.width, rank, size), call.width},
              {at(inner(p), rank, size), inner(p)},
              {at(call.width, rank, size), call.width}},
        query(p.query, first_head * group(call) * call.attention.key_size, num_heads * group(call) * call.attention.key_size),
        key(p.key, first_head * call.attention.key_size, num_heads * call.attention.key_size),
        value(p.value, first_head * call.attention.value_size, num_heads * call.attention.value_size),
        output(p.output, share.output.first, at(call.width, rank + 1, size) - share.output.first),
        gate(p.gate, share.active.first, at(inner(p), rank + 1, size) - share.active.first),
        up(p.up, share.active.first, gate.projection.weight.columns),
        down(p.down, share.down.first, output.projection.weight.columns),
        layer(call.layer),
        keys(call.keys.bytes * num_heads * slots(call)),
        values(call.values.bytes * num_heads * slots(call)),
        out(call.tokens * call.width * linear::size_of(call.attention.type)) {
    layer.query = query.projection, layer.key = key.projection, layer.value = value.projection, layer.output = output.projection;
    layer.gate = gate.projection, layer.up = up.projection, layer.down = down.projection, layer.share = share;
  }

  static int64_t group(const LayerCall& call) { return call.attention.num_heads / call.attention.num_kv_heads; }
  static int64_t inner(const RandomProjections& p) { return p.gate.projection.weight.columns; }
  static int64_t slots(const LayerCall& call) { return call.attention.table_stride * call.attention.block_size; }
};

// All ranks at once, twice, a thread each, in slots of a few rows.
void run_shared(const LayerCall& whole, std::deque<RankOfLayer>& shared) {
  const auto size = static_cast<int64_t>(shared.size());
  std::vector<uint64_t> numbers(static_cast<size_t>(8 * size));
  const int64_t slot_bytes = 37 * gathered_bytes({shared[0].layer, whole.attention});
  const Bytes slots(2 * slot_bytes);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      RankOfLayer& own = shared[static_cast<size_t>(rank)];
      LayerCall call{own.layer, whole.attention};
      call.tokens = whole.tokens, call.width = whole.width, call.rotary = whole.rotary, call.angle_type = whole.angle_type;
      call.hidden = whole.hidden, call.cos = whole.cos, call.sin = whole.sin, call.slots = whole.slots, call.out = own.out.as();
      call.keys = {own.keys.as(), own.num_heads, whole.keys.block_size, whole.keys.bytes, whole.keys.is_rounded};
      call.values = {own.values.as(), own.num_heads, whole.values.block_size, whole.values.bytes, whole.values.is_rounded};
      call.attention.keys = call.keys.data, call.attention.values = call.values.data;
      call.attention.num_heads = own.num_heads * RankOfLayer::group(whole), call.attention.num_kv_heads = own.num_heads;
      Ranks ranks;
      ranks.numbers = numbers.data(), ranks.slots[0] = slots.as(), ranks.slots[1] = slots.as() + slot_bytes, ranks.slot_bytes = slot_bytes;
      ranks.rank = rank, ranks.size = size, ranks.spins = 100, ranks.gives_up = [](int64_t other) { return static_cast<int>(other >= 0); };
      Gathers gathers(ranks);
      for (int i = 0; i < 2; ++i) {
        const Division division = divide(call.attention, 1);
        LayerRun run(call, division, 1, &gathers);
        const Bytes memory(run.bytes());
        run.run({}, memory.as());
      }
      expect(!gathers.has_failed(), "ranks that share a layer keep in step");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void check_layer(Random& random) {
  const Storage type = static_cast<Storage>(between(random, 0, 2));
  const int bits = static_cast<int>(4 * between(random, 0, 2));
  const int64_t whole = bits == 4 ? 32 : 1;  // what a depth is a multiple of
  const bool is_long = between(random, 0, 4) == 0;
  const int64_t size = linear::size_of(type), width = whole * between(random, 1, 70 / whole), inner = whole * between(random, 1, (bits == 4 ? 160 : 90) / whole),
                kv_heads = between(random, 1, 3), heads = kv_heads * between(random, 1, 3), key_size = 2 * between(random, 1, 20),
                value_size = whole * between(random, 1, 40 / whole), rotary = 2 * between(random, 1, key_size / 2);
  const auto projection = [&](int64_t columns, int64_t depth) {
    const int64_t group = bits != 4 ? 0 : depth % 128 == 0 ? 128 : depth % 64 == 0 ? 64 : 32;
    return RandomProjection(random, columns, depth, type, {bits, group, false});
  };
  const RandomProjection query = projection(heads * key_size, width), key = projection(kv_heads * key_size, width),
                         value = projection(kv_heads * value_size, width), output = projection(width, heads * value_size),
                         gate = projection(inner, width), up = projection(inner, width), down = projection(width, inner);
  const Numbers wide(random, 2 * width, type), narrow(random, 2 * key_size, type);
  const bool has_head_norms = between(random, 0, 1);
  const auto norm = [&](const Numbers& from, int64_t count, int64_t which) {
    return RmsNorm{from.bytes.as() + which * count * size, count, 1e-5f, static_cast<RmsWeight>(between(random, 0, 2))};
  };
  const DecoderLayer layer{norm(wide, width, 0),
                           has_head_norms ? norm(narrow, key_size, 0) : RmsNorm{},
                           has_head_norms ? norm(narrow, key_size, 1) : RmsNorm{},
                           norm(wide, width, 1),
                           query.projection, key.projection, value.projection, output.projection, gate.projection, up.projection, down.projection,
                           static_cast<Activation>(between(random, 1, 4))};
  const Row row(random, is_long);
  const Storage angle_type = between(random, 0, 1) ? type : Storage::float32;
  const Numbers hidden(random, row.tokens * width, type), cos(random, row.tokens * rotary, angle_type), sin(random, row.tokens * rotary, angle_type);
  const int64_t num_slots = row.num_blocks * row.block * kv_heads;
  const bool is_rounded = between(random, 0, 1);
  const int64_t key_bytes = is_rounded ? key_size + scale_bytes : key_size * size, value_bytes = is_rounded ? value_size + scale_bytes : value_size * size;
  const Numbers all_keys(random, num_slots * key_size, type), all_values(random, num_slots * value_size, type);
  const Bytes keys(num_slots * key_bytes), values(num_slots * value_bytes);
  const HeadSlots key_slots{keys.as(), kv_heads, row.block, key_bytes, is_rounded}, value_slots{values.as(), kv_heads, row.block, value_bytes, is_rounded};
  std::vector<int64_t> every(static_cast<size_t>(row.num_blocks * row.block));
  std::iota(every.begin(), every.end(), 0);
  const auto fill_heads = [&](const Numbers& from, int64_t numbers, const HeadSlots& to, int64_t first) {
    const char* const head = from.bytes.as() + first * numbers * size;
    write_slots(type, head, kv_heads * numbers, numbers, numbers, every.data(), 0, static_cast<int64_t>(every.size()), to);
  };
  fill_heads(all_keys, key_size, key_slots, 0);
  fill_heads(all_values, value_size, value_slots, 0);
  const Bytes own_keys(num_slots * key_bytes), own_values(num_slots * value_bytes);
  const Bytes expected(row.tokens * width * size), out(row.tokens * width * size);
  AttentionCall attention{};
  attention.type = type, attention.is_rounded = is_rounded, attention.num_rows = 1, attention.num_heads = heads, attention.num_kv_heads = kv_heads;
  attention.key_size = key_size, attention.value_size = value_size, attention.block_size = row.block, attention.table_stride = row.num_blocks;
  attention.positions = row.positions.data(), attention.indptr = row.indptr.data(), attention.block_table = row.table.data();
  attention.text_lens = row.text_lens.data(), attention.scale = 0.3f, attention.window = between(random, 0, 1) ? between(random, 1, 50) : 0;
  for (const std::string& isa : offered_isas()) {
    set_isa(isa);
    std::memcpy(own_keys.as(), keys.as(), static_cast<size_t>(num_slots * key_bytes));
    std::memcpy(own_values.as(), values.as(), static_cast<size_t>(num_slots * value_bytes));
    LayerCall call{layer, attention};
    call.tokens = row.tokens, call.width = width, call.rotary = rotary, call.angle_type = angle_type;
    call.hidden = hidden.bytes.as(), call.cos = cos.bytes.as(), call.sin = sin.bytes.as(), call.slots = row.slots.data();
    call.keys = key_slots, call.values = value_slots;
    call.attention.keys = call.keys.data, call.attention.values = call.values.data, call.out = expected.as();
    by_parts(call);
    call.keys.data = own_keys.as(), call.values.data = own_values.as(), call.out = out.as();
    call.attention.keys = call.keys.data, call.attention.values = call.values.data;
    const int64_t parts = between(random, 1, 4);
    const Division division = divide(call.attention, parts);
    run_whole(call, division, parts);
    const bool same = std::memcmp(expected.as(), out.as(), static_cast<size_t>(row.tokens * width * size)) == 0 &&
                      std::memcmp(keys.as(), own_keys.as(), static_cast<size_t>(num_slots * key_bytes)) == 0 &&
                      std::memcmp(values.as(), own_values.as(), static_cast<size_t>(num_slots * value_bytes)) == 0;
    expect(same, "a layer in one call gives the bits of its parts, and leaves the same keys and values");
    const int64_t ranks = std::min({kv_heads, width, inner});
    if (ranks == 1) continue;
    std::deque<RankOfLayer> shared;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      RankOfLayer& own = shared.emplace_back(call, RandomProjections{query, key, value, output, gate, up, down}, rank, ranks);
      fill_heads(all_keys, key_size, {own.keys.as(), own.num_heads, row.block, key_bytes, is_rounded}, own.first_head);
      fill_heads(all_values, value_size, {own.values.as(), own.num_heads, row.block, value_bytes, is_rounded}, own.first_head);
    }
    run_shared(call, shared);
    for (const RankOfLayer& own : shared)
      expect(std::memcmp(expected.as(), own.out.as(), static_cast<size_t>(row.tokens * width * size)) == 0, "ranks that share a layer give its bits");
  }
}

}  // namespace harness
