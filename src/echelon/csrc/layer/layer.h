// The decoder layer of Llama and its kin as one piece of work: norm and attention, norm and gated MLP, each added to the residual. Every
// part gives the bits that it gives alone; what is saved is the way from one to the next, which beside a few tokens costs more than they.
//
// No PyTorch here: the sanitiser harness builds these files alone (bindings/layer.cpp is the binding).
#pragma once

#include "../attention/division.h"
#include "../elementwise/elementwise.h"
#include "../linear/linear.h"
#include "../workers.h"
#include "ranks.h"

namespace echelon {

struct RmsNorm {
  const void* weight;  // [size]; null: none
  int64_t size;
  float eps;
  RmsWeight how;
};

struct Projection {
  linear::Weight weight;
  const float* bias;  // null: none
};

// Which columns a rank computes of what attention and the activation give, and of the projections of these back to hidden states.
struct LayerShare {
  Columns attended, output, active, down;
};

// Weights of one layer, all of one type, and of as many bits if of integers, whose groups are alike where they meet one x; `query_norm` and `key_norm` normalise each head. Of a layer that
// several ranks share, projections have this rank's columns.
struct DecoderLayer {
  RmsNorm input_norm, query_norm, key_norm, mlp_norm;
  Projection query, key, value, output, gate, up, down;
  Activation activation;
  std::optional<LayerShare> share;
};

// New tokens on their way through a layer: hidden and out [T, width], cos and sin [T, rotary]. `attention` says all but its query and out;
// `keys` and `values` are the cache that it reads, and `slots` [T] where the tokens' own go.
struct LayerCall {
  const DecoderLayer& layer;
  AttentionCall attention;
  int64_t tokens, width, rotary;
  Storage angle_type;
  const void *hidden, *cos, *sin;
  HeadSlots keys, values;
  const int64_t* slots;
  void* out;
};

// Whether more than one thread pays.
bool is_worth_sharing(const LayerCall& call);

// Bytes that a row takes in a slot of the ranks that share a layer, at most; 0 where none do.
int64_t gathered_bytes(const LayerCall& call);

// One call by `parts` workers, each of which calls `run` with the same memory of `bytes()`, aligned to 64. It is done when they return.
// `division`: of its attention, for so many, which outlives it as `call` does; `gathers`: of the ranks, where several share the layer.
class LayerRun {
 public:
  LayerRun(const LayerCall& call, const Division& division, int64_t parts, Gathers* gathers = nullptr);
  int64_t bytes() const { return bytes_; }
  void run(Worker worker, char* memory);

 private:
  // Where in memory lies what: first for all tokens, then for a chunk of rows, then for each worker.
  struct Offsets {
    int64_t queries, attended, partials, normed, query, key, value, normed_query, normed_key, turned_key, middle, added, gate, up, active, packed, sums;
  };

  void project(Worker worker, char* memory, int64_t first, int64_t rows);
  void attend_in_turn(Worker worker, char* memory);
  void activate_tiles(char* memory, int64_t rows, int64_t first, int64_t last) const;
  void feed_forward(Worker worker, char* memory, int64_t first, int64_t rows);
  void normalise(const RmsNorm& norm, const void* x, void* out, int64_t begin, int64_t end) const;
  linear::Pass pass_of(const linear::Problem& problem) const { return {problem, family_, 0, problem.rows}; }
  float* sums(Worker worker, char* memory, const linear::Pass& pass) const;

  const LayerCall& call_;
  Gathers* const gathers_;
  const linear::Family& family_;
  const int64_t size_;  // bytes of a number
  AttentionCall attention_;
  const Division& division_;
  std::atomic<int64_t> next_unit_ = 0, next_combination_ = 0;
  Shares tiles_;  // of one product after another
  Offsets at_;
  int64_t bytes_ = 0, rows_at_once_ = linear::most_rows;  // of the output and the MLP
};

}  // namespace echelon
