#include <algorithm>
#include <cmath>
#include <cstring>

#include "../linear/linear.h"
#include "harness.h"

namespace harness {
namespace {

using namespace echelon::linear;
using echelon::Activation;
using echelon::Storage;

float widen(uint16_t bits, Storage type) {
  if (type == Storage::float16) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
  }
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

float entry(const char* data, int64_t i, Storage type) {
  if (type != Storage::float32) {
    uint16_t bits;
    std::memcpy(&bits, data + 2 * i, 2);
    return widen(bits, type);
  }
  float value;
  std::memcpy(&value, data + 4 * i, 4);
  return value;
}

void set_entry(char* data, int64_t i, Storage type, float value) {
  if (type == Storage::float32) {
    std::memcpy(data + 4 * i, &value, 4);
  } else if (type == Storage::float16) {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(data + 2 * i, &half, 2);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t upper = bits >> 16;
    std::memcpy(data + 2 * i, &upper, 2);
  }
}

std::vector<const Family*> families(Storage type) {
  std::vector<const Family*> found;
  for (const std::string& isa : echelon::offered_isas()) {
    echelon::set_isa(isa);
    const Family* one = &family(echelon::active_features(), type);
    if (found.empty() || found.back() != one) found.push_back(one);
  }
  if (type == Storage::bfloat16) found.push_back(&emulated_amx());
  return found;
}

}  // namespace

void fill(Random& random, char* data, int64_t count, Storage type) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) set_entry(data, i, type, normal(random));
}

void run(const Problem& problem, const Family& family, int64_t parts) {
  for (int64_t first = 0; first < problem.rows; first += most_rows) {
    const Pass pass{problem, family, first, std::min(most_rows, problem.rows - first)};
    const Bytes x(pass.x_bytes());
    for (int64_t part = 0; part < parts; ++part) pass.pack({part, parts}, x.as());
    for (int64_t part = 0; part < parts; ++part) {
      const echelon::Worker worker{part, parts};
      const Bytes sums(pass.sums_bytes());
      pass.multiply(worker.first(tiles(problem.weight.columns)), worker.last(tiles(problem.weight.columns)), x.as(), sums.as<float>());
    }
  }
}

void check_linear(Random& random) {
  const Storage type = static_cast<Storage>(between(random, 0, 2));
  const int64_t rows = between(random, 1, between(random, 0, 39) ? 45 : 700), columns = between(random, 1, 140),
                depth = between(random, 1, between(random, 0, 39) ? 90 : 1400), size = size_of(type);
  const Bytes x(rows * depth * size), w(columns * depth * size), bias(columns * 4);
  fill(random, x.as(), rows * depth, type);
  fill(random, w.as(), columns * depth, type);
  fill(random, bias.as(), columns, Storage::float32);
  const Bytes packed(tiles(columns) * tile * padded_depth(depth, type) * size);
  pack_tiles(w.as(), depth, 1, columns, depth, type, 0, tiles(columns), packed.as());
  const Weight weight{packed.as(), columns, depth, type};
  const Bytes row(depth * size);
  for (int64_t n = 0; n < columns; ++n) {
    unpack_row(weight, n, row.as());
    expect(std::memcmp(row.as(), w.as() + n * depth * size, depth * size) == 0, "a row comes back from the packed weight");
  }
  const bool has_bias = between(random, 0, 1);
  for (const Family* one : families(type)) {
    const Bytes out(rows * columns * 4), rounded(rows * columns * size);
    Problem problem{x.as(), rows, depth, weight, has_bias ? bias.as<float>() : nullptr, Activation::none, out.as(), columns, true};
    run(problem, *one, between(random, 1, 5));
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t n = 0; n < columns; ++n) {
        double sum = has_bias ? bias.as<float>()[n] : 0.0, terms = std::abs(sum);
        for (int64_t k = 0; k < depth; ++k) {
          const double product = double(entry(x.as(), t * depth + k, type)) * entry(w.as(), n * depth + k, type);
          sum += product, terms += std::abs(product);
        }
        expect(std::abs(sum - out.as<float>()[t * columns + n]) <= 1e-6 * (terms + 4) * std::sqrt(double(depth) + 16), one->name);
      }
    problem.activation = static_cast<Activation>(between(random, 1, 4));
    problem.out = rounded.as(), problem.out_is_f32 = false;
    run(problem, *one, between(random, 1, 5));
    problem.rows = 1;  // the first row alone: the same bits
    const Bytes alone(columns * size);
    problem.out = alone.as();
    run(problem, *one, 1);
    expect(std::memcmp(alone.as(), rounded.as(), columns * size) == 0, "a row is its own whatever the call");
  }
}

}  // namespace harness
