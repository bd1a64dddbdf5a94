// Tensors in, tensors out: a decoder layer's weights, held as checked views, and its calls.
#include <algorithm>
#include <array>
#include <deque>
#include <tuple>
#include <vector>

#include "../layer/layer.h"
#include "bindings.h"

namespace echelon {
namespace {

constexpr size_t num_norms = 4, num_projections = 7, num_columns = 4, num_rank_arguments = 11;

// Norms of the input and the MLP, and of the heads of queries and keys, each with its epsilon and how weight and numbers meet; projections to
// query, key, value, output, gate, up and down: packed weight [N, K], N, K and bias float32 [N]. Where there is none, a tensor is empty. Of a
// layer that ranks share, first column and number of all columns of what attention gives, output, activation and down; else nothing.
struct Parts {
  List<Tensor> norms;
  List<double> epsilons;
  List<int64_t> how;
  List<Tensor> weights;
  List<int64_t> columns, depths;
  int64_t bits;
  List<int64_t> groups;
  bool has_zeros;
  List<Tensor> biases;
  List<int64_t> share;
};

// What `ops/cpu.py` calls `RankArguments`; a first number of 0: no other rank runs this pass.
Ranks ranks_of(const List<int64_t>& given) {
  CHECK(given.size() == num_rank_arguments, "of ranks ", num_rank_arguments, " numbers are needed");
  Ranks ranks;
  if (!given[0]) return ranks;
  ranks.numbers = reinterpret_cast<uint64_t*>(given[0]);
  ranks.slots[0] = reinterpret_cast<char*>(given[1]), ranks.slot_bytes = given[2], ranks.slots[1] = ranks.slots[0] + ranks.slot_bytes;
  ranks.rank = given[3], ranks.size = given[4], ranks.count = static_cast<uint64_t>(given[5]), ranks.is_owed = given[6];
  if (given[7]) ranks.plan = static_cast<uint64_t>(given[8]);
  ranks.spins = given[9], ranks.gives_up = reinterpret_cast<int (*)(int64_t)>(given[10]);
  return ranks;
}

// A layer, and the tensors that its parts are views of.
class LayerTensors {
 public:
  LayerTensors(const Parts& parts, int64_t activation, int64_t num_heads, double scale, std::optional<int64_t> window, std::optional<double> softcap,
               const std::optional<Tensor>& sinks)
      : num_heads_(num_heads), scale_(scale), window_(window), softcap_(softcap) {
    CHECK(parts.norms.size() == num_norms && parts.epsilons.size() == num_norms && parts.how.size() == num_norms, "a layer has ", num_norms, " norms");
    CHECK(parts.weights.size() == num_projections && parts.biases.size() == num_projections && parts.columns.size() == num_projections &&
              parts.depths.size() == num_projections && parts.groups.size() == num_projections,
          "a layer has ", num_projections, " projections");
    CHECK(parts.norms[0].numel() && parts.norms[1].numel(), "a layer has norms of its input and of its MLP's");
    type_ = parts.norms[0].scalar_type(), width_ = parts.norms[0].numel();
    RmsNorm* const own_norms[] = {&layer_.input_norm, &layer_.mlp_norm, &layer_.query_norm, &layer_.key_norm};
    for (size_t i = 0; i < num_norms; ++i)
      if (parts.norms[i].numel()) *own_norms[i] = norm_of(parts, i);
    Projection* const own_projections[] = {&layer_.query, &layer_.key, &layer_.value, &layer_.output, &layer_.gate, &layer_.up, &layer_.down};
    for (size_t i = 0; i < num_projections; ++i) *own_projections[i] = projection_of(parts, i);
    CHECK(layer_.mlp_norm.size == width_, "norms of hidden states must have one size");
    if (!parts.share.empty()) layer_.share = share_of(parts.share);
    const int64_t inner = layer_.gate.weight.columns;
    for (const Projection* p : {&layer_.query, &layer_.key, &layer_.value, &layer_.gate, &layer_.up})
      CHECK(p->weight.depth == width_, "a projection of hidden states takes ", width_, " numbers, not ", p->weight.depth);
    check_columns(layer_.output.weight.columns, &LayerShare::output, width_, "a projection to hidden states gives ");
    check_columns(layer_.down.weight.columns, &LayerShare::down, width_, "a projection to hidden states gives ");
    CHECK(layer_.up.weight.columns == inner && layer_.up.weight.integers == layer_.gate.weight.integers, "gate and up must fit one another");
    CHECK(layer_.key.weight.integers == layer_.query.weight.integers && layer_.value.weight.integers == layer_.query.weight.integers,
          "query, key and value share what is rounded of a row");
    check_columns(inner, &LayerShare::active, layer_.down.weight.depth, "the last projection takes ");
    layer_.activation = activation_of(activation);
    CHECK(!sinks || sinks->numel() == num_heads, "each head has a sink");
    if (const std::optional<Tensor> found = float32_of(sinks)) sinks_ = data_of<float>(keep(*found));
  }

  // The call of this layer, its out aside, after checks: hidden [1, T, width], cos and sin [1, T, R], all contiguous; the layer's keys and
  // values in the cache, slots int64 [T].
  LayerCall call(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values, const Tensor& slots,
                 const Places& places) const {
    LayerCall call{layer_, attention_of(places, type_, keys, values, num_heads_, scale_, window_, softcap_)};
    call.attention.sinks = sinks_;
    call.tokens = slots.numel(), call.width = width_, call.rotary = last_size(cos);
    const AttentionCall& a = call.attention;
    CHECK(hidden.numel() == call.tokens * width_ && hidden.scalar_type() == type_ &&
                    places.positions.numel() == call.tokens,
                "hidden states must be [1, T, ", width_, "] of the weights' dtype, with a slot and a position a token");
    CHECK(layer_.query.weight.columns == num_heads_ * a.key_size && layer_.key.weight.columns == a.num_kv_heads * a.key_size &&
                    layer_.value.weight.columns == a.num_kv_heads * a.value_size,
                "the projections must fit the heads of the cache");
    check_columns(num_heads_ * a.value_size, &LayerShare::attended, layer_.output.weight.depth, "the projection behind attention takes ");
    for (const RmsNorm* norm : {&layer_.query_norm, &layer_.key_norm})
      CHECK(!norm->weight || norm->size == a.key_size, "norms of heads must fit them");
    CHECK(cos.numel() == call.tokens * call.rotary && sin.numel() == cos.numel() && cos.scalar_type() == sin.scalar_type() &&
                    call.rotary % 2 == 0 && call.rotary <= a.key_size && (cos.scalar_type() == type_ || cos.scalar_type() == ScalarType::Float),
                "cos and sin must be [1, T, R] with even R, of the hidden states' dtype or float32");
    check_slots(slots, keys, values);
    call.angle_type = storage_of(cos.scalar_type());
    call.cos = cos.const_data_ptr(), call.sin = sin.const_data_ptr();
    call.keys = slots_of(keys), call.values = slots_of(values), call.slots = data_of<int64_t>(slots);
    return call;
  }

 private:
  friend const LayerTensors& layer_of(const Tensor& bytes);

  const Tensor& keep(const Tensor& tensor) { return kept_.emplace_back(tensor); }

  static LayerShare share_of(const List<int64_t>& numbers) {
    CHECK(numbers.size() == 2 * num_columns, "a share of a layer has ", num_columns, " pairs of numbers");
    LayerShare share;
    Columns* const all[] = {&share.attended, &share.output, &share.active, &share.down};
    for (size_t i = 0; i < num_columns; ++i) *all[i] = {numbers[2 * i], numbers[2 * i + 1]};
    return share;
  }

  // So many columns must be the rank's own of `whole`, or all of them.
  void check_columns(int64_t count, Columns LayerShare::* place, int64_t whole, const char* what) const {
    const Columns own = layer_.share ? (*layer_.share).*place : Columns{0, count};
    CHECK(own.whole == whole && own.first >= 0 && count <= whole - own.first, what, whole, " numbers, not ", own.whole, " with ", count, " from ", own.first);
  }

  RmsNorm norm_of(const Parts& parts, size_t i) {
    const Tensor& weight = keep(parts.norms[i]);
    CHECK(weight.scalar_type() == type_ && weight.is_contiguous(), "norms must be contiguous and of one dtype");
    return {weight.const_data_ptr(), weight.numel(), static_cast<float>(parts.epsilons[i]), static_cast<RmsWeight>(parts.how[i])};
  }

  Projection projection_of(const Parts& parts, size_t i) {
    const Tensor& bias = keep(parts.biases[i]);
    const float* const added = bias.numel() ? bias_of(bias, parts.columns[i]) : nullptr;
    return {weight_of(keep(parts.weights[i]), parts.columns[i], parts.depths[i], type_, {parts.bits, parts.groups[i], parts.has_zeros}), added};
  }

  ScalarType type_;
  int64_t num_heads_, width_;
  double scale_;
  std::optional<int64_t> window_;
  std::optional<double> softcap_;
  const float* sinks_ = nullptr;
  DecoderLayer layer_{};
  std::deque<Tensor> kept_;
  const LayerTensors* self_ = this;
};

// A layer as a tensor of bytes, which are its own: it lives as long as the tensor does.
Tensor decoder_layer(List<Tensor> norms, List<double> epsilons, List<int64_t> how, List<Tensor> weights, List<int64_t> columns,
                     List<int64_t> depths, int64_t bits, List<int64_t> groups, bool has_zeros, List<Tensor> biases, int64_t activation, int64_t num_heads,
                     double scale, std::optional<int64_t> window, std::optional<double> softcap, const std::optional<Tensor>& sinks,
                     List<int64_t> share) {
  const Parts parts{norms, epsilons, how, weights, columns, depths, bits, groups, has_zeros, biases, share};
  const std::vector<int64_t> size = {sizeof(LayerTensors)}, stride = {1};
  return torch::stable::from_blob(new LayerTensors(parts, activation, num_heads, scale, window, softcap, sinks), size, stride,
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
                                  [](void* layer) { delete static_cast<LayerTensors*>(layer); });
}

const LayerTensors& layer_of(const Tensor& bytes) {
  CHECK(bytes.scalar_type() == ScalarType::Byte && bytes.numel() == sizeof(LayerTensors), "this is no layer");
  const auto* layer = static_cast<const LayerTensors*>(bytes.const_data_ptr());
  CHECK(layer->self_ == layer, "this is a copy of a layer's bytes, whose tensors may be gone");
  return *layer;
}

// One layer after the other, each with its own keys and values, by the same workers.
Tensor run_layers(List<Tensor> layers, const Tensor& given, const Tensor& given_cos, const Tensor& given_sin, List<Tensor> keys,
                  List<Tensor> values, const Tensor& slots, const Tensor& positions,
                  const Tensor& indptr, const Tensor& block_table, const std::optional<Tensor>& parents, const std::optional<Tensor>& node_indptr,
                  const Tensor& text_lens, List<int64_t> given_ranks) {
  CHECK(keys.size() == layers.size() && values.size() == layers.size(), "every layer needs its keys and values");
  CHECK(!layers.empty(), "there are no layers to run");
  const Tensor hidden = whole(given), cos = whole(given_cos), sin = whole(given_sin);
  const std::vector<int64_t> shape = sizes_of(hidden);
  const Tensor outs[] = {empty(shape, hidden.scalar_type()), layers.size() > 1 ? empty(shape, hidden.scalar_type()) : hidden};
  if (hidden.numel() == 0) return outs[0];
  std::deque<LayerCall> calls;
  for (size_t i = 0; i < layers.size(); ++i) {
    calls.push_back(layer_of(layers[i]).call(hidden, cos, sin, keys[i], values[i], slots, {positions, indptr, block_table, text_lens, parents, node_indptr}));
    calls.back().hidden = i ? calls[i - 1].out : hidden.const_data_ptr();
    calls.back().out = outs[i % 2].mutable_data_ptr();
  }
  const bool is_alone = omp_in_parallel() || std::none_of(calls.begin(), calls.end(), is_worth_sharing);
  const int64_t parts = is_alone ? 1 : num_threads();
  int64_t gathered = 0;
  for (const LayerCall& call : calls) gathered = std::max(gathered, gathered_bytes(call));
  CHECK(given_ranks.empty() == !gathered, "ranks go with layers that they share");
  Ranks ranks = gathered ? ranks_of(given_ranks) : Ranks{};
  if (gathered && !ranks.numbers) ranks.slot_bytes = gathered * std::min(calls.front().tokens, linear::most_rows);
  CHECK(!gathered || ranks.slot_bytes >= gathered, "ranks have ", ranks.slot_bytes, " bytes for a row of ", gathered);
  const Tensor apart = empty({ranks.numbers ? 0 : 2 * ranks.slot_bytes}, ScalarType::Byte);
  if (!ranks.numbers) ranks.slots[0] = static_cast<char*>(apart.mutable_data_ptr()), ranks.slots[1] = ranks.slots[0] + ranks.slot_bytes;
  Gathers gathers(ranks);
  std::deque<std::pair<const LayerCall&, Division>> divisions;  // of layers that differ in heads or window
  std::deque<LayerRun> runs;
  for (const LayerCall& call : calls) {
    const auto alike = std::ranges::find_if(divisions, [&](const auto& own) { return are_divided_alike(own.first.attention, call.attention); });
    const Division& division = alike != divisions.end() ? alike->second : divisions.emplace_back(call, divide(call.attention, parts)).second;
    runs.emplace_back(call, division, parts, &gathers);
  }
  const int64_t bytes = std::max_element(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.bytes() < b.bytes(); })->bytes();
  char* const memory = scratch(bytes);
  const auto run_all = [&](Worker worker) {
    for (LayerRun& run : runs)
      if (!gathers.has_failed()) run.run(worker, memory);
  };
  gathers.begin();
  if (parts == 1) {
    run_all({});
  } else {
#pragma omp parallel num_threads(parts)
    run_all({omp_get_thread_num(), omp_get_num_threads()});
  }
  CHECK(!gathers.has_failed(), "another rank has ended, hangs or runs something else");
  return outs[(layers.size() - 1) % 2];
}

}  // namespace

void define_layer(Library& library) {
  library.def("decoder_layer(Tensor[] norms, float[] epsilons, int[] how, Tensor[] weights, int[] columns, int[] depths, int bits, "
              "int[] groups, bool has_zeros, Tensor[] biases, int activation, int num_heads, float scale, int? window, float? softcap, Tensor? sinks, int[] share) -> Tensor");
  library.def("run_layers(Tensor[] layers, Tensor hidden, Tensor cos, Tensor sin, Tensor(a!)[] keys, Tensor(b!)[] values, Tensor slots, "
              "Tensor positions, Tensor indptr, Tensor block_table, Tensor? parents, Tensor? node_indptr, Tensor text_lens, int[] ranks) -> Tensor");
  library.impl("decoder_layer", TORCH_BOX(&decoder_layer));
  library.impl("run_layers", TORCH_BOX(&run_layers));
}

}  // namespace echelon
