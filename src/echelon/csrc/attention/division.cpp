#include "division.h"

#include <algorithm>

namespace echelon {
namespace {

int64_t keys_of(const AttentionCall& call, const AttentionUnit& unit) {
  return std::min<int64_t>(unit.key_end, *std::max_element(call.positions + unit.token_begin, call.positions + unit.token_end) + 1) -
         unit.key_begin;
}

// Units of one section each instead of units of all keys.
void split_keys(const AttentionCall& call, Division& division) {
  std::vector<AttentionUnit> whole;
  std::swap(whole, division.units);
  int64_t total = 0;
  for (const auto& unit : whole) total += partial_size(call, unit) * ((keys_of(call, unit) + key_section - 1) / key_section);
  division.partials.resize(static_cast<size_t>(total));
  float* partial = division.partials.data();
  for (auto unit : whole) {
    const int64_t count = (keys_of(call, unit) + key_section - 1) / key_section;
    unit.partial = partial;
    division.combinations.emplace_back(unit, count);
    for (int64_t i = 0; i < count; ++i, partial += partial_size(call, unit)) {
      unit.key_begin = i * key_section;
      unit.key_end = unit.key_begin + key_section;
      unit.partial = partial;
      division.units.push_back(unit);
    }
  }
}

}  // namespace

Division divide(const AttentionCall& call, int64_t num_threads) {
  const int64_t at_once = tokens_per_unit(call), enough = 4 * num_threads;
  int64_t blocks = 0;
  for (int64_t row = 0; row < call.num_rows; ++row) blocks += (call.indptr[row + 1] - call.indptr[row] + at_once - 1) / at_once;
  const int64_t heads_at_once = std::clamp<int64_t>(call.num_kv_heads * blocks / enough, 1, call.num_kv_heads);
  Division division;
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t token = call.indptr[row]; token < call.indptr[row + 1]; token += at_once)
      for (int64_t head = 0; head < call.num_kv_heads; head += heads_at_once)
        division.units.push_back({row, token, std::min<int64_t>(token + at_once, call.indptr[row + 1]), head,
                                  std::min(head + heads_at_once, call.num_kv_heads), 0, INT64_MAX, nullptr});
  const auto is_long = [&](const AttentionUnit& unit) { return keys_of(call, unit) > key_section; };
  if (blocks * call.num_kv_heads < enough && std::ranges::any_of(division.units, is_long)) split_keys(call, division);
  const auto cost = [&](const AttentionUnit& unit) { return keys_of(call, unit) * (unit.head_end - unit.head_begin); };
  std::stable_sort(division.units.begin(), division.units.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });  // long ones first
  return division;
}

}  // namespace echelon
