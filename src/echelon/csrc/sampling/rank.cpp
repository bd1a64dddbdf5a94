#include "rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "noise.h"

namespace echelon {
namespace {

constexpr int64_t lanes = 16, chunk = 64;
constexpr int64_t longest_column = 64;  // logits that one maximum stands for
constexpr float infinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float value;
  int64_t token;
  bool operator<(const Candidate& other) const { return value > other.value || (value == other.value && token < other.token); }
};

struct Ranked {
  double score;
  int64_t token;
};

// What a row's work needs besides its logits; one a thread, kept.
struct Scratch {
  std::vector<float> maxima;
  std::vector<Candidate> candidates;
  std::vector<Ranked> ranked;
};

// The largest of every column, 16 columns of `height` rows side by side; the last block is filled up with −∞. Returns whether one is NaN.
INLINE bool columns_of(const float* logits, int64_t size, int64_t height, float* maxima) {
  int32_t has_nan[lanes] = {};
  for (int64_t first = 0; first < size; first += lanes * height, maxima += lanes) {
    float highest[lanes];
    for (int64_t j = 0; j < lanes; ++j) highest[j] = -infinity;
    const int64_t end = std::min(size, first + lanes * height);
    int64_t i = first;
    for (; i + lanes <= end; i += lanes)
      for (int64_t j = 0; j < lanes; ++j) {
        const float value = logits[i + j];
        highest[j] = value > highest[j] ? value : highest[j];
        has_nan[j] |= value != value;
      }
    for (int64_t j = 0; i + j < end; ++j) {
      const float value = logits[i + j];
      highest[j] = value > highest[j] ? value : highest[j];
      has_nan[j] |= value != value;
    }
    for (int64_t j = 0; j < lanes; ++j) maxima[j] = highest[j];
  }
  int32_t any = 0;
  for (int64_t j = 0; j < lanes; ++j) any |= has_nan[j];
  return any != 0;
}

// Σ exp((logit − highest) · sharpness): float32 over a few logits in each lane, float64 over these sums, in an order that the size alone gives.
INLINE double mass_of(const float* logits, int64_t size, float highest, float sharpness) {
  constexpr int64_t block = lanes * chunk;
  double total = 0.0;
  for (int64_t first = 0; first < size; first += block) {
    const int64_t end = std::min(size, first + block);
    float sums[lanes] = {};
    int64_t i = first;
    for (; i + lanes <= end; i += lanes)
      for (int64_t j = 0; j < lanes; ++j) sums[j] += exponential((logits[i + j] - highest) * sharpness);
    for (int64_t j = 0; i + j < end; ++j) sums[j] += exponential((logits[i + j] - highest) * sharpness);
    for (int64_t j = 0; j < lanes; ++j) total += static_cast<double>(sums[j]);
  }
  return total;
}

INLINE bool reaches(const float* logits, float threshold) {
  int32_t found = 0;
  for (int64_t i = 0; i < chunk; ++i) found |= logits[i] >= threshold;
  return found != 0;
}

// The `count` largest, in order. As many columns have a maximum of at least `threshold`, so no smaller logit can be among them.
void select(const float* logits, int64_t size, float threshold, int64_t count, std::vector<Candidate>& out) {
  out.clear();
  by_features([&]() ALWAYS_INLINE {
    for (int64_t first = 0; first < size; first += chunk) {
      const int64_t end = std::min(size, first + chunk);
      if (end - first == chunk && !reaches(logits + first, threshold)) continue;
      for (int64_t i = first; i < end; ++i)
        if (logits[i] >= threshold) out.push_back({logits[i], i});
    }
  });
  const auto last = out.begin() + count;
  if (last < out.end()) std::nth_element(out.begin(), last, out.end());
  out.resize(static_cast<size_t>(count));
  std::sort(out.begin(), out.end());
}

// Height of the columns: as tall as leaves four times as many as are wanted, so that their maxima pass few others; 0 where none does.
int64_t height_for(int64_t size, int64_t count) {
  const int64_t height = std::min(size / (4 * count), longest_column);
  return height >= 2 ? height : 0;
}

// Ranks s.candidates, which descend, by what the request would choose; the arithmetic is `reference._perturbed`.
void perturb(const Draw& draw, double sharpness, Scratch& s) {
  const auto count = s.candidates.size();
  const double top_k = draw.top_k > 0 ? static_cast<double>(draw.top_k) : std::numeric_limits<double>::infinity();
  const auto scaled = [&](size_t i) {
    return (static_cast<double>(s.candidates[i].value) - static_cast<double>(s.candidates[0].value)) / draw.temperature;
  };
  const auto share = [&](size_t i) {
    const double weight = std::exp(scaled(i));
    return weight >= draw.min_p && static_cast<double>(i) < top_k ? weight : 0.0;
  };
  double total = 0.0;
  for (size_t i = 0; i < count; ++i) total += share(i);
  const uint64_t key = noise_key(draw.seed, draw.index, draw.position);
  s.ranked.clear();
  double sum = 0.0, best = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < count; ++i) {
    const double weight = share(i);
    sum += weight;
    const bool is_kept = sum - weight < draw.top_p * total && weight > 0.0;
    const int64_t token = s.candidates[i].token;
    const double score = is_kept ? scaled(i) + gumbel(noise_bits(key, token)) : -std::numeric_limits<double>::infinity();
    s.ranked.push_back({score, token});
    best = std::max(best, score);
  }
  double mass = 0.0;
  for (Ranked& entry : s.ranked) {
    entry.score = (entry.score - best) * sharpness;
    mass += std::exp(entry.score);
  }
  const double normaliser = std::log(mass);
  for (Ranked& entry : s.ranked) entry.score -= normaliser;
  std::stable_sort(s.ranked.begin(), s.ranked.end(), [](const Ranked& a, const Ranked& b) { return a.score > b.score; });
}

}  // namespace

void likeliest(const float* logits, int64_t vocabulary, const Draw& draw, int64_t width, int64_t num_candidates, double sharpness,
               bool only_ranks, int64_t* tokens, double* scores) {
  thread_local Scratch s;
  const bool is_drawn = draw.temperature > 0.0;
  const int64_t count = is_drawn ? num_candidates : width, height = height_for(vocabulary, count), block = lanes * std::max<int64_t>(height, 1);
  s.maxima.resize(static_cast<size_t>((vocabulary + block - 1) / block * lanes));
  const bool has_nan = by_features([&]() ALWAYS_INLINE { return columns_of(logits, vocabulary, block / lanes, s.maxima.data()); });
  const float highest = *std::max_element(s.maxima.begin(), s.maxima.end());
  if (has_nan || !(std::abs(highest) < infinity)) {
    for (int64_t i = 0; i < width; ++i) tokens[i] = i, scores[i] = -std::numeric_limits<double>::infinity();
    return;
  }
  float threshold = -infinity;
  if (height > 0) {
    std::nth_element(s.maxima.begin(), s.maxima.begin() + (count - 1), s.maxima.end(), std::greater<>());
    threshold = s.maxima[static_cast<size_t>(count - 1)];
  }
  select(logits, vocabulary, threshold, count, s.candidates);
  if (is_drawn) {
    perturb(draw, sharpness, s);
    for (int64_t i = 0; i < width; ++i) tokens[i] = s.ranked[static_cast<size_t>(i)].token, scores[i] = s.ranked[static_cast<size_t>(i)].score;
    return;
  }
  const double whole = only_ranks ? 0.0 : std::log(by_features([&]() ALWAYS_INLINE { return mass_of(logits, vocabulary, highest, static_cast<float>(sharpness)); }));
  for (int64_t i = 0; i < width; ++i) {
    const Candidate& found = s.candidates[static_cast<size_t>(i)];
    tokens[i] = found.token, scores[i] = (static_cast<double>(found.value) - static_cast<double>(highest)) * sharpness - whole;
  }
}

}  // namespace echelon
