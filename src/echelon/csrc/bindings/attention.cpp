// Tensors in, tensors out: checks, division of work and threads around attention.cpp.
#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>

#include "../attention/division.h"
#include "../clock.h"
#include "../workers.h"
#include "bindings.h"

namespace echelon {
namespace {

const int32_t* int32_of(const Tensor& x) {
  CHECK(x.scalar_type() == ScalarType::Int && x.is_contiguous(), "positions, indptr, block_table, parents, node_indptr and text_lens must be contiguous int32");
  return data_of<int32_t>(x);
}

// All threads take the next of `count` things until none is left.
template <typename Work>
void in_turn(size_t count, const Work& work) {
  const auto n = static_cast<int64_t>(count);
  std::atomic<int64_t> next = 0;
  in_parallel(std::min(num_threads(), n), 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) take_in_turn(next, n, work);
  });
}

Tensor ragged_attention(const Tensor& given, const Tensor& keys, const Tensor& values, const Tensor& positions, const Tensor& indptr,
                        const Tensor& block_table, double scale, std::optional<int64_t> window, std::optional<double> softcap,
                        const std::optional<Tensor>& sinks, const std::optional<Tensor>& parents, const std::optional<Tensor>& node_indptr,
                        const Tensor& text_lens) {
  const Clocked clocked(Part::attention);
  const Tensor query = given.stride(2) == 1 ? given : torch::stable::contiguous(given);
  const Places places{positions, indptr, block_table, text_lens, parents, node_indptr};
  AttentionCall call = attention_of(places, query.scalar_type(), keys, values, query.size(1), scale, window, softcap);
  CHECK(query.size(2) == call.key_size, "query and keys must have one size");
  CHECK(query.size(0) == positions.numel(), "each query has a position");
  CHECK(!sinks || sinks->numel() == query.size(1), "each head has a sink");
  const Tensor out = empty({query.size(0), query.size(1), call.value_size}, query.scalar_type());
  const std::optional<Tensor> sink = float32_of(sinks);
  call.query = query.const_data_ptr(), call.query_token_stride = query.stride(0), call.query_head_stride = query.stride(1);
  call.out = out.mutable_data_ptr();
  call.sinks = sink ? data_of<float>(*sink) : nullptr;
  const Division division = divide(call, num_threads());
  const std::unique_ptr<float[]> partials(new float[static_cast<size_t>(division.num_partials)]);
  call.partials = partials.get();
  in_turn(division.units.size(), [&](int64_t i) { attend(call, division.units[i]); });
  in_turn(division.combinations.size(), [&](int64_t i) { combine(call, division.combinations[i].first, division.combinations[i].second); });
  return out;
}

}  // namespace

AttentionCall attention_of(const Places& places, ScalarType type, const Tensor& keys, const Tensor& values, int64_t num_heads,
                           double scale, std::optional<int64_t> window, std::optional<double> softcap) {
  CHECK(keys.is_contiguous() && values.is_contiguous(), "keys and values must be contiguous");
  CHECK(keys.scalar_type() == values.scalar_type() && (is_rounded(keys) || keys.scalar_type() == type), "one dtype for query, keys and values");
  CHECK(keys.dim() == 4 && values.dim() == 4, "keys and values must be [blocks, heads, block_size, size]");
  for (const int64_t dimension : {0, 1, 2}) CHECK(keys.size(dimension) == values.size(dimension), "keys and values must be of as many blocks, heads and slots");
  for (const int64_t size : {numbers_of(keys), numbers_of(values)})
    CHECK(size >= 1 && size <= largest_head, "heads of ", size, " numbers; attention serves 1 to ", largest_head);
  CHECK(keys.size(1) >= 1 && num_heads % keys.size(1) == 0, "query heads must be a multiple of key/value heads");
  AttentionCall call{};
  call.type = storage_of(type), call.is_rounded = is_rounded(keys);
  call.keys = keys.const_data_ptr(), call.values = values.const_data_ptr();
  call.num_rows = places.indptr.size(0) - 1, call.num_heads = num_heads, call.num_kv_heads = keys.size(1);
  call.key_size = numbers_of(keys), call.value_size = numbers_of(values), call.block_size = keys.size(2), call.table_stride = places.block_table.size(1);
  call.positions = int32_of(places.positions), call.indptr = int32_of(places.indptr), call.block_table = int32_of(places.block_table);
  call.text_lens = int32_of(places.text_lens);
  CHECK(call.num_rows >= 0 && call.indptr[call.num_rows] == places.positions.numel(), "indptr must end with the number of positions");
  CHECK(places.block_table.size(0) >= call.num_rows && places.text_lens.numel() >= call.num_rows, "each row has a line of block_table and a text_len");
  if (places.parents) {
    CHECK(places.node_indptr && places.node_indptr->numel() == call.num_rows + 1, "parents need node_indptr [B + 1]");
    call.parents = int32_of(*places.parents), call.node_indptr = int32_of(*places.node_indptr);
    CHECK(call.node_indptr[call.num_rows] == places.parents->numel(), "node_indptr must end with the number of parents");
  }
  call.scale = static_cast<float>(scale), call.softcap = static_cast<float>(softcap.value_or(0.0)), call.window = window.value_or(0);
  return call;
}

void define_attention(Library& library) {
  library.def("ragged_attention(Tensor query, Tensor keys, Tensor values, Tensor positions, Tensor indptr, Tensor block_table, float scale, "
              "int? window, float? softcap, Tensor? sinks, Tensor? parents, Tensor? node_indptr, Tensor text_lens) -> Tensor");
  library.impl("ragged_attention", TORCH_BOX(&ragged_attention));
}

}  // namespace echelon
