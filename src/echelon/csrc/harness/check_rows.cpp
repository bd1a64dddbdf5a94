#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../elementwise/elementwise.h"
#include "../sampling/rank.h"
#include "../sampling/sample.h"
#include "harness.h"

namespace harness {
namespace {

using namespace echelon;

template <Storage type>
struct Values {
  using Stored = typename Number<type>::Stored;
  Bytes bytes;
  Values(Random& random, int64_t count) : bytes(count * sizeof(Stored)) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) data()[i] = Number<type>::narrow(normal(random));
  }
  Stored* data() const { return bytes.as<Stored>(); }
  double operator[](int64_t i) const { return Number<type>::widen(data()[i]); }
};

template <Storage type>
constexpr double rounding = type == Storage::float32 ? 3e-6 : type == Storage::float16 ? 1.1e-3 : 8e-3;

void near(double got, double expected, double size, double allowed, const char* what) {
  expect(std::abs(got - expected) <= allowed * (std::abs(expected) + size), what);
}

template <Storage type>
void check_norms(Random& random) {
  const int64_t rows = between(random, 1, 9), size = between(random, 1, 300), stride = size + between(random, 0, 9);
  const Values<type> x(random, rows * stride), weight(random, size), bias(random, size), out(random, rows * size);
  const Rows in{x.data(), stride};
  const auto how = static_cast<RmsWeight>(between(random, 0, 2));
  const float eps = 1e-5f;
  rms_norm(type, in, weight.data(), out.data(), 0, rows, size, eps, how);
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0.0;
    for (int64_t i = 0; i < size; ++i) squares += x[row * stride + i] * x[row * stride + i];
    for (int64_t i = 0; i < size; ++i) {
      const double y = x[row * stride + i] / std::sqrt(squares / static_cast<double>(size) + eps);
      near(out[row * size + i], y * (how == RmsWeight::one_plus ? 1.0 + weight[i] : weight[i]), 1e-3, 2 * rounding<type>, "rms_norm");
    }
  }
  const bool has_weight = between(random, 0, 1), has_bias = has_weight && between(random, 0, 1);
  const Values<type> zero(random, size);
  for (int64_t i = 0; i < size; ++i) zero.data()[i] = Number<type>::narrow(0.0f);
  const auto* shift = has_bias ? bias.data() : zero.data();
  layer_norm(type, in, has_weight ? weight.data() : nullptr, has_weight ? shift : nullptr, out.data(), 0, rows, size, eps);
  for (int64_t row = 0; row < rows; ++row) {
    double mean = 0.0, squares = 0.0;
    for (int64_t i = 0; i < size; ++i) mean += x[row * stride + i] / static_cast<double>(size);
    for (int64_t i = 0; i < size; ++i) squares += std::pow(x[row * stride + i] - mean, 2);
    for (int64_t i = 0; i < size; ++i) {
      const double scale = (has_weight ? weight[i] : 1.0) / std::sqrt(squares / static_cast<double>(size) + eps);
      const double terms = std::abs(x[row * stride + i] * scale) + std::abs(mean * scale);  // what cancels
      near(out[row * size + i], (x[row * stride + i] - mean) * scale + (has_bias ? bias[i] : 0.0), 0.05 + terms, rounding<type>, "layer_norm");
    }
  }
}

template <Storage type>
void check_activations(Random& random) {
  const int64_t rows = between(random, 1, 9), size = between(random, 1, 300), stride = size + between(random, 0, 9);
  const Values<type> x(random, rows * stride), other(random, rows * stride), out(random, rows * size);
  const auto kind = static_cast<Activation>(between(random, 0, 4));
  const bool is_gated = between(random, 0, 1);
  activate(type, kind, {x.data(), stride}, is_gated ? Rows{other.data(), stride} : Rows{nullptr, 0}, out.data(), 0, rows, size);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < size; ++i) {
      const double v = x[row * stride + i];
      const double y = kind == Activation::none   ? v
                       : kind == Activation::relu ? std::max(v, 0.0)
                       : kind == Activation::silu ? v / (1.0 + std::exp(-v))
                       : kind == Activation::gelu ? v * 0.5 * (1.0 + std::erf(v / std::sqrt(2.0)))
                                                  : v * 0.5 * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v)));
      near(out[row * size + i], is_gated ? y * other[row * stride + i] : y, 0.3, rounding<type>, "activate");
    }
}

template <Storage type>
void check_rotation(Random& random) {
  const int64_t tokens = between(random, 1, 9), heads = between(random, 1, 5), half = between(random, 1, 40), rotary = 2 * half;
  const int64_t size = rotary + between(random, 0, 9), head_stride = size + between(random, 0, 3), token_stride = heads * head_stride;
  const Values<type> x(random, tokens * token_stride), cos(random, tokens * rotary), sin(random, tokens * rotary), out(random, tokens * heads * size);
  rotate(type, type, x.data(), token_stride, head_stride, cos.data(), sin.data(), out.data(), 0, tokens, heads, size, rotary);
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < size; ++i) {
        const int64_t from = token * token_stride + head * head_stride;
        double y = x[from + i], added = 0.1;  // products are rounded before they are added, and may cancel
        if (i < rotary) {
          const double turned = i < half ? -x[from + i + half] : x[from + i - half];
          const double kept = y * cos[token * rotary + i], crossed = turned * sin[token * rotary + i];
          y = kept + crossed;
          added = std::max(added, std::abs(kept) + std::abs(crossed));
        }
        near(out[(token * heads + head) * size + i], y, added, rounding<type>, "rotate");
      }
}

// Heads of 8 bits: integers near their numbers, and the scale that makes them so, in the slots of their tokens and nowhere else.
template <Storage type>
void check_rounded_slots(Random& random) {
  const int64_t tokens = between(random, 1, 9), heads = between(random, 1, 4), size = between(random, 1, 80), block = between(random, 1, 8);
  const int64_t head_stride = size + between(random, 0, 3), token_stride = heads * head_stride, bytes = size + scale_bytes;
  const int64_t num_slots = (tokens + block - 1) / block * block;
  const Values<type> x(random, tokens * token_stride);
  const Bytes slots(num_slots * heads * bytes);
  std::memset(slots.as(), 77, static_cast<size_t>(num_slots * heads * bytes));
  std::vector<int64_t> order(static_cast<size_t>(num_slots));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  write_slots(type, x.data(), token_stride, head_stride, size, order.data(), 0, tokens, {slots.as(), heads, block, bytes, true});
  for (int64_t place = 0; place < num_slots; ++place)
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t slot = order[static_cast<size_t>(place)];
      const char* const own = slots.as() + ((slot / block * heads + head) * block + slot % block) * bytes;
      if (place >= tokens) {
        expect(std::all_of(own, own + bytes, [](char c) { return c == 77; }), "a slot that nothing goes to stays as it is");
        continue;
      }
      float scale;
      std::memcpy(&scale, own + size, scale_bytes);
      double largest = 0.0;
      for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::abs(x[place * token_stride + head * head_stride + i]));
      near(scale, largest / 127.0, 0.0, 1e-6, "the scale of a head");
      for (int64_t i = 0; i < size; ++i)
        expect(std::abs(static_cast<int8_t>(own[i]) * double(scale) - x[place * token_stride + head * head_stride + i]) <= 0.501 * scale,
               "integers of a head are near their numbers");
    }
}

template <Storage type>
void check_type(Random& random) {
  check_rounded_slots<type>(random);
  check_norms<type>(random);
  check_activations<type>(random);
  check_rotation<type>(random);
}

}  // namespace

void check_elementwise(Random& random) {
  switch (between(random, 0, 2)) {
    case 0: return check_type<Storage::float32>(random);
    case 1: return check_type<Storage::bfloat16>(random);
    default: return check_type<Storage::float16>(random);
  }
}

// What must hold whatever the noise: the token is one that the filters leave, found again from the same row, and the likeliest when cold.
void check_sample(Random& random) {
  std::normal_distribution<float> normal;
  const int64_t size = between(random, 1, between(random, 0, 9) ? 40 : 3000);
  const Bytes logits(size * 4);
  for (int64_t i = 0; i < size; ++i)
    logits.as<float>()[i] = between(random, 0, 9) ? 3.0f * normal(random) : between(random, 0, 1) ? 1.0f : -INFINITY;
  logits.as<float>()[between(random, 0, size - 1)] = 2.0f;
  SampleRow row{logits.as<float>(), 0.7f, between(random, 0, 1) ? between(random, 1, size) : 0, between(random, 0, 1) ? 0.8 : 1.0,
                between(random, 0, 1) ? 0.05f : 0.0f, random(), random(), random()};
  const int64_t token = sample(row, size);
  expect(token >= 0 && token < size, "a token of the vocabulary");
  expect(sample(row, size) == token, "the same row draws the same token");
  const float own = row.logits[token], highest = *std::max_element(row.logits, row.logits + size);
  int64_t larger = 0;
  double above = 0.0, total = 0.0;
  for (int64_t i = 0; i < size; ++i) larger += row.logits[i] > own;
  expect(row.top_k == 0 || larger < row.top_k, "top_k holds");
  expect(row.min_p == 0.0f || std::exp((own - highest) / row.temperature) >= row.min_p * 0.9999f, "min_p holds");
  std::vector<float> sorted(row.logits, row.logits + size);
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const float least = row.top_k > 0 ? sorted[static_cast<size_t>(std::min(row.top_k, size) - 1)] : -INFINITY;
  for (const float value : sorted) {
    const double weight = std::exp((value - highest) / row.temperature);
    if (value < least || weight < row.min_p * 0.9999) continue;
    total += weight, above += value > own ? weight : 0.0;
  }
  expect(above <= row.top_p * total * 1.0001, "top_p holds");
  row.top_k = 1;
  expect(row.logits[sample(row, size)] == highest, "top_k of 1 is the likeliest");
  logits.as<float>()[between(random, 0, size - 1)] = NAN;
  expect(sample(row, size) == -1, "NaN is refused");
}

// Greedy: exactly what a sort gives, with the log of its share. Drawn: scores fall, their mass is at most 1, and no token comes twice.
void check_rank(Random& random) {
  std::normal_distribution<float> normal;
  const int64_t size = between(random, 1, between(random, 0, 3) ? 300 : 9000), width = between(random, 1, std::min<int64_t>(size, 40));
  const int64_t count = between(random, width, size);
  const Bytes logits(size * 4), tokens(width * 8), scores(width * 8);
  const bool has_ties = between(random, 0, 1);
  for (int64_t i = 0; i < size; ++i) {
    const float value = 3.0f * normal(random);
    logits.as<float>()[i] = between(random, 0, 9) ? (has_ties ? std::round(value) : value) : -INFINITY;
  }
  logits.as<float>()[between(random, 0, size - 1)] = 2.0f;
  const float* x = logits.as<float>();
  int64_t* ids = tokens.as<int64_t>();
  double* found = scores.as<double>();
  std::vector<int64_t> order(static_cast<size_t>(size));
  const double sharpness = between(random, 0, 1) ? 1.0 : 1.5;
  double mass = 0.0;
  for (int64_t i = 0; i < size; ++i) order[static_cast<size_t>(i)] = i, mass += std::exp(sharpness * static_cast<double>(x[i]));
  std::stable_sort(order.begin(), order.end(), [x](int64_t a, int64_t b) { return x[a] > x[b]; });
  Draw draw{0.0, 0, 1.0, 0.0, random(), random(), random()};
  likeliest(x, size, draw, width, count, sharpness, false, ids, found);
  for (int64_t i = 0; i < width; ++i) {
    expect(ids[i] == order[static_cast<size_t>(i)], "tokens in order, the lower of equals first");
    const double expected = sharpness * x[ids[i]] - std::log(mass);
    expect(expected == -INFINITY ? found[i] == -INFINITY : std::abs(found[i] - expected) < 1e-5, "log-probabilities");
  }
  draw.temperature = 0.7, draw.top_k = between(random, 0, 20), draw.top_p = between(random, 0, 1) ? 0.8 : 1.0, draw.min_p = 0.01;
  likeliest(x, size, draw, width, count, sharpness, false, ids, found);
  mass = 0.0;
  for (int64_t i = 0; i < width; ++i) {
    mass += std::exp(found[i]);
    expect(ids[i] >= 0 && ids[i] < size && std::count(ids, ids + width, ids[i]) == 1, "a token of the vocabulary, once");
    expect(i == 0 || found[i] <= found[i - 1], "scores fall");
  }
  expect(mass <= 1.0 + 1e-9 && found[0] > -INFINITY, "scores are log-probabilities");
  logits.as<float>()[between(random, 0, size - 1)] = NAN;
  likeliest(x, size, draw, width, count, sharpness, false, ids, found);
  expect(found[0] == -INFINITY, "NaN is refused");
}

}  // namespace harness
