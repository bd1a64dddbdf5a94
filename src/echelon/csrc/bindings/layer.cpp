// Tensors in, tensors out: a decoder layer's weights, held as checked views, and its calls.
#include <ATen/Parallel.h>
#include <omp.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <deque>
#include <tuple>
#include <vector>

#include "../layer/layer.h"
#include "bindings.h"

namespace echelon {
namespace {

using at::Tensor;

// weight [N], epsilon, how the one meets the other
using NormArguments = std::tuple<Tensor, double, int64_t>;
// packed weight [N, K], N, K, its integers, bias float32 [N] or none
using ProjectionArguments = std::tuple<Tensor, int64_t, int64_t, IntegerArguments, std::optional<Tensor>>;

// A layer, and the tensors that its parts are views of.
class LayerTensors {
 public:
  // Norms of the input and the MLP, and of the heads of queries and keys; projections to query, key, value, output, gate, up, down.
  LayerTensors(const std::array<std::optional<NormArguments>, 4>& norms, const std::array<ProjectionArguments, 7>& projections, int64_t activation,
               int64_t num_heads, double scale, std::optional<int64_t> window, std::optional<double> softcap, const std::optional<Tensor>& sinks)
      : num_heads_(num_heads), scale_(scale), window_(window), softcap_(softcap) {
    TORCH_CHECK(norms[0] && norms[1], "a layer has norms of its input and of its MLP's");
    type_ = std::get<0>(*norms[0]).scalar_type(), width_ = std::get<0>(*norms[0]).numel();
    RmsNorm* const own_norms[] = {&layer_.input_norm, &layer_.mlp_norm, &layer_.query_norm, &layer_.key_norm};
    for (size_t i = 0; i < norms.size(); ++i)
      if (norms[i]) *own_norms[i] = norm_of(*norms[i]);
    Projection* const own_projections[] = {&layer_.query, &layer_.key, &layer_.value, &layer_.output, &layer_.gate, &layer_.up, &layer_.down};
    for (size_t i = 0; i < projections.size(); ++i) *own_projections[i] = projection_of(projections[i]);
    TORCH_CHECK(layer_.mlp_norm.size == width_, "norms of hidden states must have one size");
    for (const Projection* p : own_projections)
      TORCH_CHECK(p->weight.integers == layer_.query.weight.integers, "the weights of a layer must be of one kind");
    const int64_t inner = layer_.gate.weight.columns;
    for (const Projection* p : {&layer_.query, &layer_.key, &layer_.value, &layer_.gate, &layer_.up})
      TORCH_CHECK(p->weight.depth == width_, "a projection of hidden states takes ", width_, " numbers, not ", p->weight.depth);
    for (const Projection* p : {&layer_.output, &layer_.down})
      TORCH_CHECK(p->weight.columns == width_, "a projection to hidden states gives ", width_, " numbers, not ", p->weight.columns);
    TORCH_CHECK(layer_.up.weight.columns == inner && layer_.down.weight.depth == inner, "gate, up and down must fit one another");
    layer_.activation = activation_of(activation);
    if (sinks) sinks_ = keep(sinks->to(at::kFloat).contiguous()).const_data_ptr<float>();
  }

  // The call of this layer, its out aside, after checks: hidden [1, T, width], cos and sin [1, T, R], all contiguous; the layer's keys and
  // values in the cache, slots int64 [T].
  LayerCall call(const Tensor& hidden, const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values, const Tensor& slots,
                 const Places& places) const {
    LayerCall call{layer_, attention_of(places, type_, keys, values, num_heads_, scale_, window_, softcap_)};
    call.attention.sinks = sinks_;
    call.tokens = slots.numel(), call.width = width_, call.rotary = cos.size(-1);
    const AttentionCall& a = call.attention;
    TORCH_CHECK(hidden.numel() == call.tokens * width_ && hidden.scalar_type() == type_ &&
                    places.positions.numel() == call.tokens,
                "hidden states must be [1, T, ", width_, "] of the weights' dtype, with a slot and a position a token");
    TORCH_CHECK(layer_.query.weight.columns == num_heads_ * a.key_size && layer_.key.weight.columns == a.num_kv_heads * a.key_size &&
                    layer_.value.weight.columns == a.num_kv_heads * a.value_size && layer_.output.weight.depth == num_heads_ * a.value_size,
                "the projections must fit the heads of the cache");
    for (const RmsNorm* norm : {&layer_.query_norm, &layer_.key_norm})
      TORCH_CHECK(!norm->weight || norm->size == a.key_size, "norms of heads must fit them");
    TORCH_CHECK(cos.numel() == call.tokens * call.rotary && sin.numel() == cos.numel() && cos.scalar_type() == sin.scalar_type() &&
                    call.rotary % 2 == 0 && call.rotary <= a.key_size && (cos.scalar_type() == type_ || cos.scalar_type() == at::kFloat),
                "cos and sin must be [1, T, R] with even R, of the hidden states' dtype or float32");
    check_slots(slots, keys, values);
    call.angle_type = storage_of(cos.scalar_type());
    call.cos = cos.const_data_ptr(), call.sin = sin.const_data_ptr();
    call.keys = slots_of(keys), call.values = slots_of(values), call.slots = slots.const_data_ptr<int64_t>();
    return call;
  }

 private:
  const Tensor& keep(const Tensor& tensor) { return kept_.emplace_back(tensor); }

  RmsNorm norm_of(const NormArguments& norm) {
    const auto& [weight, eps, how] = norm;
    TORCH_CHECK(weight.scalar_type() == type_ && weight.is_contiguous(), "norms must be contiguous and of one dtype");
    return {keep(weight).const_data_ptr(), weight.numel(), static_cast<float>(eps), static_cast<RmsWeight>(how)};
  }

  Projection projection_of(const ProjectionArguments& projection) {
    const auto& [packed, columns, depth, integers, bias] = projection;
    if (bias) keep(*bias);
    return {weight_of(keep(packed), columns, depth, type_, integers), bias_of(bias, columns)};
  }

  at::ScalarType type_;
  int64_t num_heads_, width_;
  double scale_;
  std::optional<int64_t> window_;
  std::optional<double> softcap_;
  const float* sinks_ = nullptr;
  DecoderLayer layer_{};
  std::vector<Tensor> kept_;
};

// One layer after the other, each with its own keys and values, by the same workers.
Tensor run_layers(const std::vector<const LayerTensors*>& layers, const Tensor& given, const Tensor& given_cos, const Tensor& given_sin,
                  const std::vector<Tensor>& keys, const std::vector<Tensor>& values, const Tensor& slots, const Tensor& positions,
                  const Tensor& indptr, const Tensor& block_table, const std::optional<Tensor>& parents, const std::optional<Tensor>& node_indptr,
                  const Tensor& text_lens) {
  TORCH_CHECK(keys.size() == layers.size() && values.size() == layers.size(), "every layer needs its keys and values");
  const Tensor hidden = given.contiguous(), cos = given_cos.contiguous(), sin = given_sin.contiguous();
  if (layers.empty() || hidden.numel() == 0) return hidden;
  const Tensor outs[] = {at::empty_like(hidden), layers.size() > 1 ? at::empty_like(hidden) : hidden};
  std::deque<LayerCall> calls;
  for (size_t i = 0; i < layers.size(); ++i) {
    calls.push_back(layers[i]->call(hidden, cos, sin, keys[i], values[i], slots, {positions, indptr, block_table, text_lens, parents, node_indptr}));
    calls.back().hidden = i ? calls[i - 1].out : hidden.const_data_ptr();
    calls.back().out = outs[i % 2].mutable_data_ptr();
  }
  const bool is_alone = at::in_parallel_region() || std::none_of(calls.begin(), calls.end(), is_worth_sharing);
  const int64_t parts = is_alone ? 1 : at::get_num_threads();
  std::deque<LayerRun> runs;
  for (const LayerCall& call : calls) runs.emplace_back(call, parts);
  const int64_t bytes = std::max_element(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.bytes() < b.bytes(); })->bytes();
  char* const memory = scratch(bytes);
  const auto run_all = [&](Worker worker) {
    for (LayerRun& run : runs) run.run(worker, memory);
  };
  if (parts == 1) {
    run_all({});
  } else {
#pragma omp parallel num_threads(parts)
    run_all({omp_get_thread_num(), omp_get_num_threads()});
  }
  return outs[(layers.size() - 1) % 2];
}

}  // namespace

void bind_layer(pybind11::module_& module) {
  using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<LayerTensors>(module, "DecoderLayer")
      .def(pybind11::init<const std::array<std::optional<NormArguments>, 4>&, const std::array<ProjectionArguments, 7>&, int64_t, int64_t, double,
                          std::optional<int64_t>, std::optional<double>, const std::optional<Tensor>&>());
  module.def("run_layers", &run_layers, Unlocked());
}

}  // namespace echelon
