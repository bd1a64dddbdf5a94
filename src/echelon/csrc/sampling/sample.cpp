#include "sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"

namespace echelon {
namespace {

constexpr int64_t num_bins = 4096, bins_per_unit = 64;  // of values by their distance from the largest
constexpr int64_t block = 256;         // tokens whose noise is bounded at a time
constexpr float infinity = std::numeric_limits<float>::infinity();

// Larger values have smaller bins.
INLINE size_t bin_of(float value, float highest) {
  return static_cast<size_t>(std::min((highest - value) * static_cast<float>(bins_per_unit), static_cast<float>(num_bins - 1)));
}

// Divides by the temperature; returns the largest result, or NaN where one is among them.
INLINE float scale(const float* logits, float temperature, float* out, int64_t size) {
  float highest[16];
  int32_t has_nan[16] = {};
  std::fill(highest, highest + 16, -infinity);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16)
    for (int64_t j = 0; j < 16; ++j) {
      const float value = logits[i + j] / temperature;
      out[i + j] = value;
      highest[j] = value > highest[j] ? value : highest[j];
      has_nan[j] |= value != value;
    }
  for (int64_t j = 0; i + j < size; ++j) {
    const float value = logits[i + j] / temperature;
    out[i + j] = value;
    highest[j] = value > highest[j] ? value : highest[j];
    has_nan[j] |= value != value;
  }
  float best = -infinity;
  for (int64_t j = 0; j < 16; ++j) {
    if (has_nan[j]) return std::numeric_limits<float>::quiet_NaN();
    best = std::max(best, highest[j]);
  }
  return best;
}

INLINE void weights_of(const float* scaled, float highest, double* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = exponential(static_cast<double>(scaled[i] - highest));
}

// What a row's work needs besides its logits; one a thread, kept.
struct Scratch {
  std::vector<float> scaled, members;
  std::vector<double> weights;
};

// The k-th largest value: a histogram by leading bits, then a selection within one bin.
float kth_largest(Scratch& s, float highest, int64_t k) {
  std::array<int32_t, num_bins> counts{};
  for (const float value : s.scaled) ++counts[bin_of(value, highest)];
  size_t bin = 0;
  for (; counts[bin] < k; ++bin) k -= counts[bin];
  s.members.clear();
  for (const float value : s.scaled)
    if (bin_of(value, highest) == bin) s.members.push_back(value);
  std::nth_element(s.members.begin(), s.members.begin() + (k - 1), s.members.end(), std::greater<>());
  return s.members[static_cast<size_t>(k - 1)];
}

// The smallest value that top_p keeps among those of at least `threshold`: the mass of all larger ones is less than top_p of the whole.
// Sums are float64, in order of token within a bin, and of bins.
float nucleus(Scratch& s, float highest, float threshold, double top_p) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  s.weights.resize(s.scaled.size());
  by_features([&]() ALWAYS_INLINE { weights_of(s.scaled.data(), highest, s.weights.data(), size); });
  std::array<double, num_bins> mass{};
  for (size_t i = 0; i < s.scaled.size(); ++i)
    if (s.scaled[i] >= threshold) mass[bin_of(s.scaled[i], highest)] += s.weights[i];
  double total = 0.0, larger = 0.0;
  for (const double part : mass) total += part;
  const double wanted = top_p * total;
  size_t bin = 0;  // the one in which the wanted mass is reached
  for (; larger + mass[bin] < wanted; ++bin) larger += mass[bin];
  s.members.clear();
  for (const float value : s.scaled)
    if (value >= threshold && bin_of(value, highest) == bin) s.members.push_back(value);
  std::sort(s.members.begin(), s.members.end(), std::greater<>());
  float smallest = s.members.front();
  for (size_t i = 0; i < s.members.size() && larger < wanted; ++i) {
    smallest = s.members[i];
    larger += exponential(static_cast<double>(smallest - highest));
  }
  return smallest;
}

float threshold_of(const SampleRow& row, Scratch& s, float highest) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  float threshold = -infinity;
  if (row.min_p > 0.0f) threshold = highest + std::log(row.min_p);
  if (row.top_k > 0 && row.top_k < size) threshold = std::max(threshold, kth_largest(s, highest, row.top_k));
  if (row.top_p < 1.0) threshold = nucleus(s, highest, threshold, row.top_p);
  return threshold;
}

struct Best {
  double score;
  int64_t token;
  // The first of equals wins, whatever the order of visits.
  void offer(double value, int64_t candidate) {
    if (value > score || (value == score && candidate < token)) *this = {value, candidate};
  }
};

// Marks tokens of a block that may still win. With w = exp(value − highest), a token's noise −log(−log u) lifts it above `best` only if
// −log u < w · exp(highest − best), and 1 − u ≤ −log u; 1 − u needs no logarithm. `bound` is exp(highest − best), a little more.
INLINE int64_t candidates(const float* scaled, float highest, float bound, uint64_t key, int64_t first, int64_t count,
                                       uint8_t* marks) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t complement = (uint64_t{1} << 52) - 1 - noise_bits(key, first + i);
    const float distance = static_cast<float>(static_cast<int64_t>(complement)) * 0x1p-52f;
    const uint8_t may_win = distance <= exponential(scaled[first + i] - highest) * bound;
    marks[i] = may_win;
    found += may_win;
  }
  return found;
}

// The token with the largest value plus noise among those of at least `threshold`.
int64_t draw(const Scratch& s, float highest, float threshold, uint64_t key) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  const int64_t likeliest = std::find(s.scaled.begin(), s.scaled.end(), highest) - s.scaled.begin();
  Best best{highest + gumbel(noise_bits(key, likeliest)), likeliest};
  std::array<uint8_t, block> marks;
  for (int64_t first = 0; first < size; first += block) {
    const int64_t count = std::min(block, size - first);
    const float bound = static_cast<float>(std::exp(std::min(static_cast<double>(highest) - best.score, 80.0))) * 1.0001f;
    const int64_t found =
        by_features([&]() ALWAYS_INLINE { return candidates(s.scaled.data(), highest, bound, key, first, count, marks.data()); });
    if (found == 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      const float value = s.scaled[static_cast<size_t>(first + i)];
      if (marks[static_cast<size_t>(i)] && value >= threshold && value > -infinity) best.offer(value + gumbel(noise_bits(key, first + i)), first + i);
    }
  }
  return best.token;
}

}  // namespace

int64_t sample(const SampleRow& row, int64_t vocabulary) {
  thread_local Scratch s;
  s.scaled.resize(static_cast<size_t>(vocabulary));
  const float highest = by_features([&]() ALWAYS_INLINE { return scale(row.logits, row.temperature, s.scaled.data(), vocabulary); });
  if (!(std::abs(highest) < infinity)) return -1;
  const uint64_t key = noise_key(row.seed, row.index, row.position);
  return draw(s, highest, threshold_of(row, s, highest), key);
}

}  // namespace echelon
