#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "../attention/division.h"
#include "../isa.h"
#include "harness.h"

namespace harness {
namespace {

using namespace echelon;

// A ragged batch: chains and trees over blocks in random order, some of their nodes cached before; NaN in every slot that no row has.
struct Batch {
  std::vector<int32_t> positions, indptr{0}, table, parents, node_indptr{0}, text_lens;
  std::vector<std::vector<int32_t>> slots;  // of every token's visible keys, in order of position
  int64_t block, table_stride, num_slots;
};

Batch random_batch(Random& random, bool has_trees) {
  Batch batch;
  batch.block = between(random, 1, 20);
  const int64_t rows = between(random, 1, 5);
  std::vector<std::vector<int32_t>> blocks;
  int64_t taken = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t before = between(random, 0, between(random, 0, 39) ? 80 : 1100), known = between(random, 1, 9);
    const int64_t nodes = between(random, 0, has_trees ? between(random, 0, 39) ? 15 : 150 : 0), text = before + known;
    const int64_t count = (text + nodes + batch.block - 1) / batch.block;
    blocks.emplace_back();
    for (int64_t i = 0; i < count; ++i) blocks.back().push_back(static_cast<int32_t>(taken++));
    batch.text_lens.push_back(static_cast<int32_t>(text));
    const int64_t cached = nodes > 1 && between(random, 0, 1) ? between(random, 1, nodes - 1) : 0;  // then the known tokens are cached too
    for (int64_t i = 0; i < (cached ? 0 : known); ++i) batch.positions.push_back(static_cast<int32_t>(before + i));
    std::vector<int32_t> depths;
    for (int64_t i = 0; i < nodes; ++i) {
      const auto parent = static_cast<int32_t>(between(random, 0, i) - 1);
      depths.push_back(parent < 0 ? 0 : depths[static_cast<size_t>(parent)] + 1);
      batch.parents.push_back(parent);
      if (i >= cached) batch.positions.push_back(static_cast<int32_t>(text) + depths.back());
    }
    batch.indptr.push_back(static_cast<int32_t>(batch.positions.size()));
    batch.node_indptr.push_back(static_cast<int32_t>(batch.parents.size()));
  }
  std::vector<int32_t> order(static_cast<size_t>(taken));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::shuffle(order.begin(), order.end(), random);
  batch.num_slots = taken * batch.block;
  batch.table_stride = 0;
  for (const auto& own : blocks) batch.table_stride = std::max<int64_t>(batch.table_stride, static_cast<int64_t>(own.size()));
  batch.table.assign(static_cast<size_t>(rows * batch.table_stride), -1);  // what lies past a row's blocks is never read
  for (size_t row = 0; row < blocks.size(); ++row)
    for (size_t i = 0; i < blocks[row].size(); ++i)
      batch.table[row * static_cast<size_t>(batch.table_stride) + i] = order[static_cast<size_t>(blocks[row][i])];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = batch.indptr[static_cast<size_t>(row)], end = batch.indptr[static_cast<size_t>(row) + 1];
    const int64_t text = batch.text_lens[static_cast<size_t>(row)], nodes = batch.node_indptr[static_cast<size_t>(row) + 1] - batch.node_indptr[static_cast<size_t>(row)];
    const int32_t* parents = batch.parents.data() + batch.node_indptr[static_cast<size_t>(row)];
    const auto slot = [&](int64_t entry) {
      return static_cast<int32_t>(batch.table[static_cast<size_t>(row * batch.table_stride + entry / batch.block)] * batch.block + entry % batch.block);
    };
    for (int64_t token = first; token < end; ++token) {
      std::vector<int32_t> path;
      int64_t node = token - end + nodes;
      for (; node >= 0; node = parents[node]) path.push_back(slot(text + node));
      for (int64_t entry = token < end - nodes ? text + nodes + token - end : text - 1; entry >= 0; --entry) path.push_back(slot(entry));
      std::reverse(path.begin(), path.end());
      batch.slots.push_back(path);
    }
  }
  return batch;
}

template <Storage type>
void check_type(Random& random) {
  using N = Number<type>;
  using Stored = typename N::Stored;
  std::normal_distribution<float> normal;
  const bool has_trees = between(random, 0, 1);
  const Batch batch = random_batch(random, has_trees);
  const int64_t group = between(random, 1, between(random, 0, 39) ? 4 : 70), kv_heads = between(random, 1, 3), heads = group * kv_heads;
  // Every size that is served: most of them small or usual, some of any kind, odd ones and the largest among them.
  const auto any_size = [&] {
    switch (between(random, 0, 39)) {
      case 0: return between(random, 1, largest_head);
      case 1: return largest_head - between(random, 0, 1);
      case 2: return int64_t{256} + between(random, -1, 1);
      case 3: case 4: case 5: case 6: case 7: return between(random, 1, 130);
      case 8: case 9: case 10: case 11: case 12: case 13: return 64 * between(random, 1, 2);
      default: return 8 * between(random, 1, 5);
    }
  };
  const int64_t key_size = any_size(), value_size = any_size(), tokens = static_cast<int64_t>(batch.positions.size());
  const bool is_rounded = between(random, 0, 1);
  const auto slot_bytes = [&](int64_t size) { return is_rounded ? size + scale_bytes : size * static_cast<int64_t>(sizeof(Stored)); };
  const Bytes query(tokens * heads * key_size * sizeof(Stored)), keys(batch.num_slots * kv_heads * slot_bytes(key_size)),
      values(batch.num_slots * kv_heads * slot_bytes(value_size)), out(tokens * heads * value_size * sizeof(Stored)), sinks(heads * 4);
  for (int64_t i = 0; i < tokens * heads * key_size; ++i) query.as<Stored>()[i] = N::narrow(normal(random));
  std::vector<char> is_seen(static_cast<size_t>(batch.num_slots));
  const int64_t window = between(random, 0, 2) ? 0 : between(random, 1, 200);
  for (size_t token = 0; token < batch.slots.size(); ++token) {
    const auto& path = batch.slots[token];
    for (size_t i = window && path.size() > static_cast<size_t>(window) ? path.size() - static_cast<size_t>(window) : 0; i < path.size(); ++i)
      is_seen[static_cast<size_t>(path[i])] = 1;
  }
  const auto at = [&](int64_t slot, int64_t head) { return (slot / batch.block * kv_heads + head) * batch.block + slot % batch.block; };
  const auto put = [&](const Bytes& to, int64_t place, int64_t size, bool is_there) {
    if (!is_rounded) {
      for (int64_t i = 0; i < size; ++i) to.as<Stored>()[place * size + i] = N::narrow(is_there ? normal(random) : NAN);
      return;
    }
    char* const slot = to.as() + place * slot_bytes(size);
    for (int64_t i = 0; i < size; ++i) slot[i] = static_cast<char>(between(random, -127, 127));
    const float scale = is_there ? 0.01f * (1.0f + std::abs(normal(random))) : NAN;
    std::memcpy(slot + size, &scale, scale_bytes);
  };
  const auto number = [&](const Bytes& from, int64_t place, int64_t size, int64_t i) -> double {
    if (!is_rounded) return N::widen(from.as<Stored>()[place * size + i]);
    const char* const slot = from.as() + place * slot_bytes(size);
    float scale;
    std::memcpy(&scale, slot + size, scale_bytes);
    return double(static_cast<int8_t>(slot[i])) * scale;
  };
  for (int64_t slot = 0; slot < batch.num_slots; ++slot)
    for (int64_t head = 0; head < kv_heads; ++head) {
      const bool is_there = is_seen[static_cast<size_t>(slot)];
      put(keys, at(slot, head), key_size, is_there);
      put(values, at(slot, head), value_size, is_there);
    }
  for (int64_t i = 0; i < heads; ++i) sinks.as<float>()[i] = normal(random);
  const float softcap = between(random, 0, 2) ? 0.0f : 3.0f, scale = 0.4f;
  const bool has_sinks = between(random, 0, 1);
  AttentionCall call{type, query.as(), keys.as(), values.as(), out.as(), heads * key_size, key_size,
                     static_cast<int64_t>(batch.indptr.size()) - 1, heads, kv_heads, key_size, value_size, batch.block,
                     batch.table_stride, batch.positions.data(), batch.indptr.data(), batch.table.data(),
                     has_trees ? batch.parents.data() : nullptr, batch.node_indptr.data(), batch.text_lens.data(), scale, softcap, window,
                     has_sinks ? sinks.as<float>() : nullptr, is_rounded};
  const int64_t at_once = between(random, 1, tokens_per_unit(call)), heads_at_once = between(random, 1, kv_heads);
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t token = batch.indptr[static_cast<size_t>(row)]; token < batch.indptr[static_cast<size_t>(row) + 1]; token += at_once)
      for (int64_t head = 0; head < kv_heads; head += heads_at_once) {
        AttentionUnit unit{row, token, std::min<int64_t>(token + at_once, batch.indptr[static_cast<size_t>(row) + 1]), head,
                           std::min(head + heads_at_once, kv_heads), 0, INT64_MAX, -1};
        if (between(random, 0, 1)) {
          attend(call, unit);
          continue;
        }
        const int64_t last = *std::max_element(batch.positions.begin() + unit.token_begin, batch.positions.begin() + unit.token_end);
        const int64_t sections = last / key_section + 1, size = partial_size(call, unit);
        const Bytes partials(sections * size * 4);
        call.partials = partials.as<float>();
        for (int64_t i = sections - 1; i >= 0; --i) {
          unit.key_begin = i * key_section, unit.key_end = unit.key_begin + key_section, unit.partial = i * size;
          attend(call, unit);
        }
        combine(call, unit, sections);
      }
  const double rounding = type == Storage::float32 ? 1e-5 : type == Storage::float16 ? 2e-3 : 1.6e-2;
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head) {
      const auto& path = batch.slots[static_cast<size_t>(token)];
      const size_t first = window && path.size() > static_cast<size_t>(window) ? path.size() - static_cast<size_t>(window) : 0;
      std::vector<double> scores;
      double highest = has_sinks ? sinks.as<float>()[head] : -INFINITY, products = 0.0;
      for (size_t i = first; i < path.size(); ++i) {
        double score = 0.0, size = 0.0;
        for (int64_t d = 0; d < key_size; ++d) {
          const double product = double(N::widen(query.as<Stored>()[(token * heads + head) * key_size + d])) *
                                 number(keys, at(path[i], head / group), key_size, d);
          score += product, size += std::abs(product);
        }
        score *= scale, products = std::max(products, size * scale);
        scores.push_back(softcap > 0.0f ? std::tanh(score / softcap) * softcap : score);
        highest = std::max(highest, scores.back());
      }
      const double allowed = rounding + products * FLT_EPSILON;  // a weight is off by as much, relatively, as its score absolutely
      double total = has_sinks ? std::exp(sinks.as<float>()[head] - highest) : 0.0;
      for (double& score : scores) total += score = std::exp(score - highest);
      for (int64_t d = 0; d < value_size; ++d) {
        double expected = 0.0, terms = 0.0;
        for (size_t i = first; i < path.size(); ++i) {
          const double term = scores[i - first] / total * number(values, at(path[i], head / group), value_size, d);
          expected += term, terms += std::abs(term);
        }
        const double got = N::widen(out.as<Stored>()[(token * heads + head) * value_size + d]);
        expect(std::abs(got - expected) <= allowed * (terms + 1e-3), "attention");
      }
    }
}

}  // namespace

// Each head of each token sees all of its keys once, sections in order, and no unit that could be smaller has more than its share of keys.
void check_division(Random& random) {
  const int64_t rows = between(random, 1, 9), group = between(random, 1, between(random, 0, 9) ? 4 : 70), kv_heads = between(random, 1, 8),
                threads = between(random, 1, 16);
  std::vector<int32_t> positions, indptr{0};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t before = between(random, 0, between(random, 0, 3) ? 700 : 40000), tokens = between(random, 1, between(random, 0, 3) ? 4 : 200);
    for (int64_t i = 0; i < tokens; ++i) positions.push_back(static_cast<int32_t>(before + i));
    indptr.push_back(static_cast<int32_t>(positions.size()));
  }
  AttentionCall call{};
  call.num_rows = rows, call.num_heads = group * kv_heads, call.num_kv_heads = kv_heads, call.value_size = 8;
  call.positions = positions.data(), call.indptr = indptr.data(), call.window = between(random, 0, 2) ? 0 : between(random, 1, 2000);
  const Division division = divide(call, threads);
  const auto keys_of = [&](const AttentionUnit& unit, int64_t token) {
    const int64_t position = positions[static_cast<size_t>(token)], first = call.window ? std::max<int64_t>(0, position - call.window + 1) : 0;
    return std::pair{std::max(unit.key_begin, first), std::min(unit.key_end, position + 1)};
  };
  std::vector<int64_t> seen(positions.size() * static_cast<size_t>(kv_heads)), costs;
  int64_t total = 0, num_partial = 0;
  for (const AttentionUnit& unit : division.units) {
    expect(indptr[static_cast<size_t>(unit.row)] <= unit.token_begin && unit.token_end <= indptr[static_cast<size_t>(unit.row) + 1], "a row's tokens");
    expect(unit.token_end - unit.token_begin <= tokens_per_unit(call), "not too many tokens");
    int64_t first = INT64_MAX, end = 0;
    for (int64_t token = unit.token_begin; token < unit.token_end; ++token) {
      const auto [begin, last] = keys_of(unit, token);
      first = std::min(first, begin), end = std::max(end, last);
      for (int64_t head = unit.head_begin; head < unit.head_end; ++head)
        seen[static_cast<size_t>(token * kv_heads + head)] += std::max<int64_t>(0, last - begin);
    }
    costs.push_back((end - first) * (unit.head_end - unit.head_begin));
    total += costs.back(), num_partial += unit.partial >= 0;
    expect(unit.partial < 0 || unit.partial + partial_size(call, unit) <= division.num_partials, "partials lie in their memory");
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    const int64_t position = positions[i / static_cast<size_t>(kv_heads)];
    expect(seen[i] == (call.window ? std::min(call.window, position + 1) : position + 1), "every key is seen once");
  }
  for (const auto& [unit, count] : division.combinations) num_partial -= count;
  expect(num_partial == 0, "every section is combined");
  const int64_t share = total / (4 * threads) + 1;
  for (size_t i = 0; i < costs.size(); ++i) {
    const AttentionUnit& unit = division.units[i];
    const bool is_least = unit.head_end - unit.head_begin == 1 && (unit.partial >= 0 || costs[i] <= key_section);
    const bool is_whole_head = unit.head_end - unit.head_begin == 1 && (threads == 1 || costs[i] <= share + key_section / 2);
    expect(is_least || is_whole_head || costs[i] <= share, "no unit that could be smaller has more than its share");
    expect(i == 0 || costs[i] <= costs[i - 1], "long ones come first");
  }
}

void check_attention(Random& random) {
  const std::vector<std::string> isas = offered_isas();
  set_isa(isas[static_cast<size_t>(between(random, 0, static_cast<int64_t>(isas.size()) - 1))]);
  switch (between(random, 0, 2)) {
    case 0: return check_type<Storage::float32>(random);
    case 1: return check_type<Storage::bfloat16>(random);
    default: return check_type<Storage::float16>(random);
  }
}

}  // namespace harness
