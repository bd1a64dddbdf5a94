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

std::vector<const Family*> families(Storage type, int bits = 0) {
  std::vector<const Family*> found;
  for (const std::string& isa : echelon::offered_isas())
    for (const bool byte_products : {false, true}) {
      echelon::set_isa(isa, byte_products);
      for (const int64_t rows : {int64_t{1}, most_rows}) {
        const Family* one = &family(echelon::active_features(), type, bits, rows);
        if (std::find(found.begin(), found.end(), one) == found.end()) found.push_back(one);
      }
    }
  if (bits || type == Storage::bfloat16) found.push_back(&emulated_amx(bits));
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
  const Bytes packed(bytes_of({nullptr, columns, depth, type}));
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

namespace {

// q − z of entry (n, k), and the scale of its group as it stands in a packed tile of 4 bits, or as it is of 8.
struct Made {
  const Weight& weight;
  const Quantised& source;

  int64_t group() const { return weight.integers.bits == 4 ? weight.integers.group : weight.depth; }
  int64_t groups() const { return weight.depth / group(); }
  int value(int64_t n, int64_t k) const {
    const int zero = weight.integers.bits == 8 ? 128 : source.zeros ? source.zeros[n * groups() + k / group()] : 8;
    return source.values[n * weight.depth + k] - zero;
  }
};

// One entry of y by definition: exact sums over groups, and groups in one float32 chain.
float by_definition(const Made& made, const int8_t* x, float x_scale, int64_t n) {
  const bool in_groups = made.weight.integers.bits == 4;
  const float* scales = made.source.scales + n * made.groups();
  float largest = 0.0f, total = 0.0f;
  for (int64_t g = 0; g < made.groups(); ++g) largest = std::max(largest, std::abs(scales[g]));
  const float factor = in_groups && largest > 0.0f ? std::ldexp(1.0f, 14 - std::ilogb(largest)) : 1.0f;
  for (int64_t g = 0; g < made.groups(); ++g) {
    int32_t sum = 0;
    for (int64_t k = g * made.group(); k < (g + 1) * made.group(); ++k) sum += x[k] * made.value(n, k);
    const float product = static_cast<float>(sum) * static_cast<float>(static_cast<_Float16>(scales[g] * factor));
    total = in_groups ? total + product : static_cast<float>(sum);
  }
  return total * (x_scale * (in_groups ? 1.0f / factor : scales[0]));
}

}  // namespace

void check_integers(Random& random) {
  const Storage type = static_cast<Storage>(between(random, 0, 2));
  const bool in_groups = between(random, 0, 1);
  const int64_t group = 32 << between(random, 0, 2), rows = between(random, 1, between(random, 0, 39) ? 45 : 530), columns = between(random, 1, 140),
                depth = in_groups ? group * between(random, 1, 24) : between(random, 1, between(random, 0, 9) ? 200 : 2500);
  const Integers integers{in_groups ? 4 : 8, in_groups ? group : 0, in_groups && between(random, 0, 1)};
  const int64_t groups = in_groups ? depth / group : 1;
  const Bytes values(columns * depth), scales(columns * groups * 4), zeros(columns * groups), x(rows * depth * size_of(type));
  for (int64_t i = 0; i < columns * depth; ++i) values.as()[i] = static_cast<char>(between(random, 0, in_groups ? 15 : 255));
  for (int64_t i = 0; i < columns * groups; ++i) {
    scales.as<float>()[i] = std::ldexp(1.0f + static_cast<float>(between(random, 0, 1023)) / 1024.0f, static_cast<int>(between(random, -12, -6)));
    zeros.as()[i] = static_cast<char>(between(random, 0, 15));
  }
  fill(random, x.as(), rows * depth, type);
  Weight weight{nullptr, columns, depth, type, integers};
  const Bytes packed(bytes_of(weight));
  const Quantised source{values.as<uint8_t>(), scales.as<float>(), integers.has_zeros ? zeros.as<uint8_t>() : nullptr};
  pack_tiles(source, weight, 0, tiles(columns), packed.as());
  weight.data = packed.as();
  const Made made{weight, source};
  const Bytes expected(rows * columns * 4), of_row(depth), sums(groups * 4);
  for (int64_t t = 0; t < rows; ++t) {
    const float scale = round_row(x.as() + t * depth * size_of(type), depth, type, made.group(), of_row.as<int8_t>(), sums.as<int32_t>());
    for (int64_t n = 0; n < columns; ++n) expected.as<float>()[t * columns + n] = by_definition(made, of_row.as<int8_t>(), scale, n);
  }
  for (const Family* one : families(type, integers.bits)) {
    const Bytes out(rows * columns * 4);
    run({x.as(), rows, depth, weight, nullptr, Activation::none, out.as(), columns, true}, *one, between(random, 1, 5));
    expect(std::memcmp(out.as(), expected.as(), rows * columns * 4) == 0, one->name);
  }
}

// Of a group in 4 bits, the squared error by the scale that was chosen, and by the one that takes the largest entry to −8.
void expect_least(const char* row, const uint8_t* values, float scale, int64_t first, int64_t group, Storage type) {
  double largest = 0.0, chosen = 0.0, simple = 0.0;
  for (int64_t k = first; k < first + group; ++k) {
    const double x = entry(row, k, type);
    largest = std::abs(x) > std::abs(largest) ? x : largest;
  }
  const double step = largest == 0.0 ? 1.0 : -largest / 8.0;
  for (int64_t k = first; k < first + group; ++k) {
    const double x = entry(row, k, type), q = std::clamp(std::nearbyint(x / step), -8.0, 7.0);
    chosen += std::pow(static_cast<double>(scale) * (values[k] - 8) - x, 2);
    simple += std::pow(step * q - x, 2);
  }
  expect(chosen <= simple * 1.0001, "no scale is worse than the simple one");
}

void check_rounded_weight(Random& random) {
  const Storage type = static_cast<Storage>(between(random, 0, 2));
  const int64_t group = 32 << between(random, 0, 2);
  const bool in_groups = between(random, 0, 1);
  const int64_t depth = in_groups ? group * between(random, 1, 8) : between(random, 1, 300), groups = in_groups ? depth / group : 1;
  const Bytes row(depth * size_of(type)), values(depth), scales(groups * 4);
  fill(random, row.as(), depth, type);
  round_weight(row.as(), depth, type, {in_groups ? 4 : 8, in_groups ? group : 0, false}, values.as<uint8_t>(), scales.as<float>());
  for (int64_t k = 0; k < depth; ++k) {
    const int q = values.as<uint8_t>()[k];
    expect(in_groups ? q < 16 : q >= 1, "integers fit their bits");
    if (in_groups) continue;
    const float scale = scales.as<float>()[0], error = scale * static_cast<float>(q - 128) - entry(row.as(), k, type);
    expect(std::abs(error) <= std::abs(scale) * 0.501f, "a rounded entry is near what it was");
  }
  for (int64_t g = 0; in_groups && g < groups; ++g)
    expect_least(row.as(), values.as<uint8_t>(), scales.as<float>()[g], g * group, group, type);
}

}  // namespace harness
