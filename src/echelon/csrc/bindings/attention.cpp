// Tensors in, tensors out: checks, division of work and threads around attention.cpp.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <utility>
#include <vector>

#include "../attention/attention.h"
#include "bindings.h"

namespace echelon {
namespace {

using at::Tensor;

const int32_t* int32_of(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.is_contiguous(), "positions, indptr, block_table, parents, node_indptr and text_lens must be contiguous int32");
  return x.const_data_ptr<int32_t>();
}

// The work of a call in units, and those whose sections are to be combined afterwards: the first of each and how many there are.
struct Division {
  std::vector<AttentionUnit> units;
  std::vector<std::pair<AttentionUnit, int64_t>> combinations;
  std::vector<float> partials;
};

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

// Pieces that no thread need wait for: blocks of a row's tokens; some heads of these where there would be too few; then sections of keys.
Division divide(const AttentionCall& call) {
  const int64_t at_once = tokens_per_unit(call), enough = 4 * at::get_num_threads();
  int64_t blocks = 0;
  for (int64_t row = 0; row < call.num_rows; ++row) blocks += (call.indptr[row + 1] - call.indptr[row] + at_once - 1) / at_once;
  const int64_t heads_at_once = std::clamp<int64_t>(call.num_kv_heads * blocks / enough, 1, call.num_kv_heads);
  Division division;
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t token = call.indptr[row]; token < call.indptr[row + 1]; token += at_once)
      for (int64_t head = 0; head < call.num_kv_heads; head += heads_at_once)
        division.units.push_back({row, token, std::min<int64_t>(token + at_once, call.indptr[row + 1]), head,
                                  std::min(head + heads_at_once, call.num_kv_heads), 0, INT64_MAX, nullptr});
  if (blocks * call.num_kv_heads < enough) split_keys(call, division);
  const auto cost = [&](const AttentionUnit& unit) { return keys_of(call, unit) * (unit.head_end - unit.head_begin); };
  std::stable_sort(division.units.begin(), division.units.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });  // long ones first
  return division;
}

// All threads take the next index until none is left.
template <typename Do>
void for_each_index(size_t count, const Do& work) {
  std::atomic<size_t> next = 0;
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), static_cast<int64_t>(count)), 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin)
      for (size_t i = next++; i < count; i = next++) work(i);
  });
}

Tensor ragged_attention(const Tensor& given, const Tensor& keys, const Tensor& values, const Tensor& positions, const Tensor& indptr,
                        const Tensor& block_table, int64_t block_size, double scale, std::optional<int64_t> window,
                        std::optional<double> softcap, const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents,
                        const std::optional<Tensor>& node_indptr, const Tensor& text_lens) {
  const Tensor query = given.stride(2) == 1 ? given : given.contiguous();
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous(), "keys and values must be contiguous");
  TORCH_CHECK(query.scalar_type() == keys.scalar_type() && keys.scalar_type() == values.scalar_type(), "one dtype for query, keys and values");
  TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && keys.size(2) == block_size && values.size(2) == block_size,
              "keys and values must be [blocks, heads, block_size, size]");
  TORCH_CHECK(query.size(2) == keys.size(3), "query and keys must have one size");
  for (const int64_t size : {keys.size(3), values.size(3)})
    TORCH_CHECK(size >= 1 && size <= largest_head, "heads of ", size, " numbers; attention serves 1 to ", largest_head);
  TORCH_CHECK(keys.size(1) >= 1 && query.size(1) % keys.size(1) == 0, "query heads must be a multiple of key/value heads");
  Tensor out = at::empty({query.size(0), query.size(1), values.size(3)}, query.options());
  const Tensor sink = sinks ? sinks->to(at::kFloat).contiguous() : Tensor();
  const AttentionCall call{storage_of(query.scalar_type()), query.const_data_ptr(), keys.const_data_ptr(), values.const_data_ptr(), out.data_ptr(),
                           query.stride(0), query.stride(1), indptr.size(0) - 1, query.size(1), keys.size(1), keys.size(3), values.size(3),
                           block_size, block_table.size(1), int32_of(positions), int32_of(indptr), int32_of(block_table),
                           parents ? int32_of(*parents) : nullptr, parents ? int32_of(*node_indptr) : nullptr, int32_of(text_lens),
                           static_cast<float>(scale), static_cast<float>(softcap.value_or(0.0)), window.value_or(0),
                           sinks ? sink.const_data_ptr<float>() : nullptr};
  const Division division = divide(call);
  for_each_index(division.units.size(), [&](size_t i) { attend(call, division.units[i]); });
  for_each_index(division.combinations.size(), [&](size_t i) { combine(call, division.combinations[i].first, division.combinations[i].second); });
  return out;
}

}  // namespace

void bind_attention(pybind11::module_& module) {
  module.def("ragged_attention", &ragged_attention, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace echelon
