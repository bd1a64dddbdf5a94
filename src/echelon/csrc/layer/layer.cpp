#include "layer.h"

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "../clock.h"
#include "../isa.h"

namespace echelon {
namespace {

constexpr int64_t worth_sharing = 1 << 20;  // bytes that one worker reads in the time that a layer's workers wait for one another

// Clocks the first worker alone; what it waits for is part of it.
class Span {
 public:
  Span(Worker worker, Part part) {
    if (worker.part == 0) clocked_.emplace(part);
  }

 private:
  std::optional<Clocked> clocked_;
};

// x [rows, K] times a weight: y [rows, N], both contiguous.
linear::Problem problem_of(const Projection& projection, const void* x, int64_t rows, void* y) {
  const linear::Weight& w = projection.weight;
  return {x, rows, w.depth, w, projection.bias, Activation::none, y, w.columns, false};
}

const char* past(const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; }

}  // namespace

bool is_worth_sharing(const LayerCall& call) {
  const DecoderLayer& l = call.layer;
  const AttentionCall& a = call.attention;
  int64_t weights = 0, keys = 0;
  for (const Projection* p : {&l.query, &l.key, &l.value, &l.output, &l.gate, &l.up, &l.down}) weights += linear::bytes_of(p->weight);
  for (int64_t t = 0; t < call.tokens; ++t) keys += a.window > 0 ? std::min<int64_t>(a.window, a.positions[t] + 1) : a.positions[t] + 1;
  const int64_t cached = keys * a.num_kv_heads * (a.key_size + a.value_size) * linear::size_of(a.type);
  return weights * (1 + call.tokens / 16) + cached >= worth_sharing;
}

int64_t gathered_bytes(const LayerCall& call) {
  const std::optional<LayerShare>& share = call.layer.share;
  if (!share) return 0;
  return std::max({share->attended.whole, share->output.whole, share->active.whole, share->down.whole}) * linear::size_of(call.attention.type);
}

LayerRun::LayerRun(const LayerCall& call, const Division& division, int64_t parts, Gathers* gathers)
    : call_(call),
      gathers_(call.layer.share ? gathers : nullptr),
      family_(linear::family(active_features(), call.attention.type, call.layer.query.weight.integers.bits, call.tokens)),
      size_(linear::size_of(call.attention.type)),
      attention_(call.attention),
      division_(division),
      tiles_(parts) {
  attention_.query_head_stride = attention_.key_size;
  attention_.query_token_stride = attention_.num_heads * attention_.key_size;
  const DecoderLayer& l = call.layer;
  const int64_t rows = std::min(linear::most_rows, call.tokens), inner = l.gate.weight.columns;
  const int64_t queries = l.query.weight.columns, keys = l.key.weight.columns, values = l.value.weight.columns;
  if (gathers_) rows_at_once_ = std::min(linear::most_rows, gathers_->slot_bytes() / gathered_bytes(call));
  const auto take = [&](int64_t bytes) {
    const int64_t start = bytes_;
    bytes_ += (bytes + 63) / 64 * 64;
    return start;
  };
  const auto numbers = [&](int64_t of_a_row) { return take(rows * of_a_row * size_); };
  at_.queries = take(call.tokens * queries * size_);
  at_.attended = take(call.tokens * attention_.num_heads * attention_.value_size * size_);
  at_.partials = take(division.num_partials * static_cast<int64_t>(sizeof(float)));
  at_.normed = numbers(call.width), at_.middle = numbers(call.width), at_.added = numbers(call.width);
  at_.query = numbers(queries), at_.normed_query = numbers(l.query_norm.weight ? queries : 0);
  at_.key = numbers(keys), at_.normed_key = numbers(l.key_norm.weight ? keys : 0), at_.turned_key = numbers(keys);
  at_.value = numbers(values);
  at_.gate = numbers(inner), at_.up = numbers(inner), at_.active = numbers(inner);
  int64_t packed = 0;
  for (const Projection* p : {&l.query, &l.output, &l.down}) {
    const linear::Problem problem = problem_of(*p, nullptr, rows, nullptr);
    packed = std::max(packed, pass_of(problem).x_bytes());
  }
  at_.packed = take(packed);
  bytes_ = linear::whole_pages(bytes_);
  const linear::Problem problem = problem_of(l.query, nullptr, rows, nullptr);
  at_.sums = take(parts * pass_of(problem).sums_bytes());
}

float* LayerRun::sums(Worker worker, char* memory, const linear::Pass& pass) const {
  return reinterpret_cast<float*>(memory + at_.sums + worker.part * pass.sums_bytes());
}

void LayerRun::normalise(const RmsNorm& norm, const void* x, void* out, int64_t begin, int64_t end) const {
  rms_norm(attention_.type, {x, norm.size}, norm.weight, out, begin, end, norm.size, norm.eps, norm.how);
}

void LayerRun::run(Worker worker, char* memory) {
  for (int64_t first = 0; first < call_.tokens; first += linear::most_rows)
    project(worker, memory, first, std::min(linear::most_rows, call_.tokens - first));
  attend_in_turn(worker, memory);
  for (int64_t first = 0; first < call_.tokens; first += rows_at_once_)
    feed_forward(worker, memory, first, std::min(rows_at_once_, call_.tokens - first));
  worker.wait();
}

// Queries with their rotary embedding to memory, keys and values to the cache. A worker packs the rows that it has normalised.
void LayerRun::project(Worker worker, char* memory, int64_t first, int64_t rows) {
  const DecoderLayer& l = call_.layer;
  const AttentionCall& a = attention_;
  const auto problem = [&](const Projection& p, int64_t to) { return problem_of(p, memory + at_.normed, rows, memory + to); };
  const linear::Problem problems[] = {problem(l.query, at_.query), problem(l.key, at_.key), problem(l.value, at_.value)};
  const linear::Pass shared = pass_of(problems[0]);
  normalise(l.input_norm, past(call_.hidden, first * call_.width * size_), memory + at_.normed, worker.first(shared.padded_rows()),
            std::min(worker.last(shared.padded_rows()), rows));
  {
    const Span span(worker, Part::linear);
    shared.pack(worker, memory + at_.packed);
    tiles_.reset(worker);
    worker.wait();
    int64_t tiles = 0;
    for (const auto& p : problems) tiles += linear::tiles(p.weight.columns);
    tiles_.take(worker, tiles, linear::tiles_at_once, shared.least(), [&](int64_t begin, int64_t end) {
      int64_t before = 0;
      for (const auto& p : problems) {
        const linear::Pass pass = pass_of(p);
        const int64_t own = linear::tiles(p.weight.columns);
        pass.multiply(std::max<int64_t>(begin - before, 0), std::min(end - before, own), memory + at_.packed, sums(worker, memory, pass));
        before += own;
      }
    });
    worker.wait();
  }
  const int64_t begin = worker.first(rows), end = worker.last(rows);
  const auto turned = [&](const RmsNorm& norm, int64_t from, int64_t normed, int64_t heads, char* to) {
    if (norm.weight) normalise(norm, memory + from, memory + normed, begin * heads, end * heads);
    const int64_t angles = first * call_.rotary * linear::size_of(call_.angle_type);
    rotate(a.type, call_.angle_type, memory + (norm.weight ? normed : from), heads * a.key_size, a.key_size, past(call_.cos, angles),
           past(call_.sin, angles), to, begin, end, heads, a.key_size, call_.rotary);
  };
  turned(l.query_norm, at_.query, at_.normed_query, a.num_heads, memory + at_.queries + first * a.query_token_stride * size_);
  turned(l.key_norm, at_.key, at_.normed_key, a.num_kv_heads, memory + at_.turned_key);
  const auto keep = [&](int64_t from, int64_t size, const HeadSlots& to) {
    write_slots(a.type, memory + from, a.num_kv_heads * size, size, size, call_.slots + first, begin, end, to);
  };
  keep(at_.turned_key, a.key_size, call_.keys);
  keep(at_.value, a.value_size, call_.values);
}

void LayerRun::attend_in_turn(Worker worker, char* memory) {
  worker.wait();  // all keys and values are written
  const Span span(worker, Part::attention);
  AttentionCall a = attention_;
  a.query = memory + at_.queries, a.out = memory + at_.attended, a.partials = reinterpret_cast<float*>(memory + at_.partials);
  take_in_turn(next_unit_, static_cast<int64_t>(division_.units.size()), [&](int64_t i) { attend(a, division_.units[i]); });
  worker.wait();
  if (division_.combinations.empty()) return;
  take_in_turn(next_combination_, static_cast<int64_t>(division_.combinations.size()), [&](int64_t i) {
    combine(a, division_.combinations[i].first, division_.combinations[i].second);
  });
  worker.wait();
}

// The activation of columns that were just computed, while they are in a cache of this worker: the weights stream past and take what
// waits with them.
void LayerRun::activate_tiles(char* memory, int64_t rows, int64_t first, int64_t last) const {
  const int64_t inner = call_.layer.gate.weight.columns;
  const int64_t column = first * linear::tile, count = std::min(last * linear::tile, inner) - column;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = (row * inner + column) * size_;
    const Rows gate{memory + at_.gate + start, inner}, up{memory + at_.up + start, inner};
    activate(attention_.type, call_.layer.activation, gate, up, memory + at_.active + start, 0, 1, count);
  }
}

// Attention's output and the MLP, each added to the residual. Where ranks share the layer, all columns are gathered before and after each
// projection back to hidden states.
void LayerRun::feed_forward(Worker worker, char* memory, int64_t first, int64_t rows) {
  const DecoderLayer& l = call_.layer;
  const Storage type = attention_.type;
  const int64_t row_bytes = call_.width * size_;
  const auto pack = [&](const linear::Problem& problem) {
    pass_of(problem).pack(worker, memory + at_.packed);
    tiles_.reset(worker);
    worker.wait();
  };
  const auto multiply = [&](const linear::Problem& problem, int64_t first_tile, int64_t last_tile) {
    const linear::Pass pass = pass_of(problem);
    pass.multiply(first_tile, last_tile, memory + at_.packed, sums(worker, memory, pass));
  };
  const auto gathered = [&](const char* own, int64_t columns, Columns LayerShare::* place) {
    return gathers_ ? gathers_->gather(worker, own, rows, columns, (*l.share).*place, size_) : own;
  };
  const auto project = [&](const Projection& projection, const char* from, Columns LayerShare::* place) {
    {
      const Span span(worker, Part::linear);
      const linear::Problem problem = problem_of(projection, from, rows, memory + at_.added);
      pack(problem);
      tiles_.take(worker, linear::tiles(problem.weight.columns), linear::tiles_at_once, pass_of(problem).least(),
                  [&](int64_t begin, int64_t end) { multiply(problem, begin, end); });
      worker.wait();
    }
    return gathered(memory + at_.added, projection.weight.columns, place);
  };
  const int64_t depth = attention_.num_heads * attention_.value_size;
  const char* added = project(l.output, gathered(memory + at_.attended + first * depth * size_, depth, &LayerShare::attended), &LayerShare::output);
  const linear::Problem gate = problem_of(l.gate, memory + at_.normed, rows, memory + at_.gate);
  const linear::Problem up = problem_of(l.up, memory + at_.normed, rows, memory + at_.up);
  const int64_t padded = pass_of(gate).padded_rows(), begin = worker.first(padded), end = std::min(worker.last(padded), rows);
  const int64_t own = std::max<int64_t>(end - begin, 0) * call_.width;
  const char* hidden = past(call_.hidden, first * row_bytes);
  char* middle = memory + at_.middle;
  add(type, hidden + begin * row_bytes, added + begin * row_bytes, middle + begin * row_bytes, own);
  normalise(l.mlp_norm, middle, memory + at_.normed, begin, end);
  {
    const Span span(worker, Part::linear);
    pack(gate);
    tiles_.take(worker, linear::tiles(l.gate.weight.columns), linear::tiles_at_once, pass_of(gate).least(), [&](int64_t begin, int64_t end) {
      multiply(gate, begin, end);
      multiply(up, begin, end);
      activate_tiles(memory, rows, begin, end);
    });
    worker.wait();
  }
  added = project(l.down, gathered(memory + at_.active, l.gate.weight.columns, &LayerShare::active), &LayerShare::down);
  add(type, middle + begin * row_bytes, added + begin * row_bytes, static_cast<char*>(call_.out) + (first + begin) * row_bytes, own);
}

}  // namespace echelon
