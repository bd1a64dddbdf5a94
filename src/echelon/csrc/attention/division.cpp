#include "division.h"

#include <algorithm>

namespace echelon {
namespace {

// Keys that tokens of a unit see: from `first` to `end` − 1.
struct Keys {
  int64_t first, end;
  int64_t count() const { return end - first; }
};

Keys keys_of(const AttentionCall& call, const AttentionUnit& unit) {
  const auto [least, most] = std::minmax_element(call.positions + unit.token_begin, call.positions + unit.token_end);
  const int64_t first = call.window > 0 ? std::max<int64_t>(0, *least - call.window + 1) : 0;
  return {std::max(unit.key_begin, first), std::min<int64_t>(unit.key_end, *most + 1)};
}

struct Sections {
  int64_t first, count;
};

Sections sections_of(const Keys& keys) {
  const int64_t first = keys.first / key_section;
  return {first, (keys.end + key_section - 1) / key_section - first};
}

// Units of one section each instead of one of all keys.
void split_keys(const AttentionCall& call, AttentionUnit unit, const Sections& sections, Division& division) {
  unit.partial = division.num_partials;
  division.combinations.emplace_back(unit, sections.count);
  for (int64_t i = sections.first; i < sections.first + sections.count; ++i, division.num_partials += partial_size(call, unit)) {
    unit.key_begin = i * key_section;
    unit.key_end = unit.key_begin + key_section;
    unit.partial = division.num_partials;
    division.units.push_back(unit);
  }
}

}  // namespace

Division divide(const AttentionCall& call, int64_t num_threads) {
  const int64_t at_once = tokens_per_unit(call), heads = call.num_kv_heads;
  std::vector<std::pair<AttentionUnit, Keys>> blocks;  // of a row's tokens, with all heads
  int64_t total = 0;
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t token = call.indptr[row]; token < call.indptr[row + 1]; token += at_once) {
      const AttentionUnit block{row, token, std::min<int64_t>(token + at_once, call.indptr[row + 1]), 0, heads, 0, INT64_MAX, -1};
      blocks.emplace_back(block, keys_of(call, block));
      total += blocks.back().second.count();
    }
  // Keys that a unit sees, each head's for itself; a head that sees little more is not worth dividing, nor is any for one thread.
  const int64_t share = total * heads / (4 * num_threads), most = num_threads > 1 ? share + key_section / 2 : INT64_MAX;
  Division division;
  for (auto [unit, keys] : blocks) {
    const int64_t heads_at_once = std::clamp<int64_t>(share / std::max<int64_t>(keys.count(), 1), 1, heads);
    const Sections sections = sections_of(keys);
    for (int64_t head = 0; head < heads; head += heads_at_once) {
      unit.head_begin = head, unit.head_end = std::min(head + heads_at_once, heads);
      if (keys.count() > most && sections.count > 1)
        split_keys(call, unit, sections, division);
      else
        division.units.push_back(unit);
    }
  }
  const auto cost = [&](const AttentionUnit& unit) { return keys_of(call, unit).count() * (unit.head_end - unit.head_begin); };
  std::stable_sort(division.units.begin(), division.units.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });  // long ones first
  return division;
}

bool are_divided_alike(const AttentionCall& call, const AttentionCall& other) {
  return call.num_heads == other.num_heads && call.num_kv_heads == other.num_kv_heads && call.value_size == other.value_size && call.window == other.window;
}

}  // namespace echelon
