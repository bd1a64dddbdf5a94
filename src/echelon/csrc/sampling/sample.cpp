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
constexpr int64_t block = 256;         // tokens that are passed over together
constexpr int64_t lanes = 16;
constexpr float infinity = std::numeric_limits<float>::infinity();

// Larger values have smaller bins.
INLINE size_t bin_of(float value, float highest) {
  return static_cast<size_t>(std::min((highest - value) * static_cast<float>(bins_per_unit), static_cast<float>(num_bins - 1)));
}

// The larger of v[i] and v[i + width], for i below width.
template <int64_t width>
INLINE void fold(const float* v, float* larger) {
  for (int64_t i = 0; i < width; ++i) larger[i] = v[i] > v[i + width] ? v[i] : v[i + width];
}

// Divides by the temperature, and fills up the last block with −∞; returns the largest result, or NaN where one is among them, and leaves the
// largest of every block.
INLINE float scale(const float* logits, float temperature, float* out, float* maxima, int64_t size) {
  int32_t has_nan = 0;
  float best = -infinity;
  for (int64_t first = 0; first < size; first += block, out += block, ++maxima) {
    const int64_t count = std::min(size - first, block);
    for (int64_t i = 0; i < count; ++i) out[i] = logits[first + i] / temperature;
    for (int64_t i = count; i < block; ++i) out[i] = -infinity;
    for (int64_t i = 0; i < block; ++i) has_nan |= out[i] != out[i];
    alignas(64) float larger[block / 2];
    fold<block / 2>(out, larger);
    fold<block / 4>(larger, larger);
    fold<block / 8>(larger, larger);
    fold<block / 16>(larger, larger);
    float largest = -infinity;
    for (int64_t i = 0; i < block / 16; ++i) largest = larger[i] > largest ? larger[i] : largest;
    *maxima = largest;
    best = largest > best ? largest : best;
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : best;
}

INLINE void weights_of(const float* scaled, float highest, double* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = exponential(static_cast<double>(scaled[i] - highest));
}

// A token whose mass decides where the nucleus ends.
struct Near {
  float value;
  double mass;
};

// What a row's work needs besides its logits; one a thread, kept.
struct Scratch {
  std::vector<float> scaled, maxima, members, rough_weights;  // scaled: whole blocks, filled up with −∞; maxima: of these
  std::vector<double> weights;
  std::vector<Near> near;
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

// Mass by distance from the highest value, in bins of one width from `origin` on.
struct Masses {
  static constexpr int64_t count = 256;
  float origin, bins_per_unit;
  std::array<double, count> by_bin{};

  size_t bin_of(float distance) const {
    return static_cast<size_t>(static_cast<int32_t>(std::min((distance - origin) * bins_per_unit, static_cast<float>(count - 1))));
  }
  void add(float distance, double mass) { by_bin[bin_of(distance)] += mass; }

  // The bin in which `wanted` is reached or, if it is not, the last; `larger` grows by the mass of those before it.
  size_t reach(double wanted, double& larger) const {
    size_t bin = 0;
    for (; bin + 1 < count && larger + by_bin[bin] < wanted; ++bin) larger += by_bin[bin];
    return bin;
  }
};

// `weight` where the value reaches the threshold, else 0: by its bits, for without AVX compilers make a jump of a choice.
INLINE float from(float threshold, float value, float weight) {
  return std::bit_cast<float>(std::bit_cast<int32_t>(weight) & -static_cast<int32_t>(value >= threshold));
}
INLINE double from(float threshold, float value, double weight) {
  return std::bit_cast<double>(std::bit_cast<int64_t>(weight) & -static_cast<int64_t>(value >= threshold));
}

INLINE float weight_of(float below_highest) { return exponential_up_to_88(below_highest); }
INLINE double weight_of(double below_highest) { return exponential(below_highest); }

template <class Weight>
INLINE void weigh(const float* values, float highest, Weight* weights) {
  for (int64_t i = 0; i < block; ++i) weights[i] = weight_of(static_cast<Weight>(values[i] - highest));
}

// The mass of those tokens of a block whose values are at least `threshold`: within `rough` of itself. Two loops: GCC 12 vectorises a choice
// inside the sum wrongly for AVX2.
constexpr double rough = 1.3e-6;
template <class Weight>
INLINE double mass_from(const float* values, const Weight* weights, float threshold) {
  alignas(64) Weight kept[block];
  for (int64_t i = 0; i < block; ++i) kept[i] = from(threshold, values[i], weights[i]);
  Weight sums[lanes] = {};
  for (int64_t i = 0; i < block; i += lanes)
    for (int64_t j = 0; j < lanes; ++j) sums[j] += kept[i + j];
  double total = 0.0;
  for (int64_t j = 0; j < lanes; ++j) total += static_cast<double>(sums[j]);
  return total;
}

INLINE double rough_mass(const float* values, float highest, float threshold) {
  alignas(64) float weights[block];
  weigh(values, highest, weights);
  return mass_from(values, weights, threshold);
}

// Which parts of a block, of as many tokens as there are lanes, have a value of at least `limit`.
INLINE void find_parts(const float* values, float limit, int32_t* reached) {
  for (int64_t i = 0; i < block; i += lanes) {
    int32_t any = 0;
    for (int64_t j = 0; j < lanes; ++j) any |= values[i + j] >= limit;
    reached[i / lanes] = any;
  }
}

// Notes the tokens of a block whose values are at least `limit`, and returns the mass of the others that reach the threshold.
template <class Weight>
double note_near(const float* values, float highest, float threshold, float limit, std::vector<Near>& near) {
  alignas(64) Weight weights[block];
  int32_t reached[block / lanes];
  by_features([&]() ALWAYS_INLINE {
    weigh(values, highest, weights);
    find_parts(values, limit, reached);
  });
  for (int64_t first = 0; first < block; first += lanes) {
    if (!reached[first / lanes]) continue;
    for (int64_t i = first; i < first + lanes; ++i) {
      if (values[i] < limit) continue;
      near.push_back({values[i], static_cast<double>(weights[i])});
      weights[i] = Weight{0};
    }
  }
  return by_features([&]() ALWAYS_INLINE { return mass_from(values, weights, threshold); });
}

// What `nucleus` returns, from weights that are within `error` of themselves, sums in another order and rough ones of what lies more than
// `near` below the highest value, if the bounds of their errors leave no doubt about it; else NaN. Where the wanted mass is reached, finer
// bins are looked at, and the values in one of these one by one.
template <class Weight>
float quick_nucleus(Scratch& s, float highest, float threshold, double top_p, double error, float near) {
  constexpr float coarse = 16.0f, fine = coarse * Masses::count;
  const float limit = std::max(highest - near, threshold);
  double far = 0.0, larger = 0.0;
  s.near.clear();
  for (size_t i = 0; i < s.maxima.size(); ++i) {
    const float* const values = s.scaled.data() + static_cast<int64_t>(i) * block;
    if (s.maxima[i] < threshold) continue;
    if (s.maxima[i] < limit)
      far += by_features([&]() ALWAYS_INLINE { return rough_mass(values, highest, threshold); });
    else
      far += note_near<Weight>(values, highest, threshold, limit, s.near);
  }
  Masses masses{0.0f, coarse};
  for (const Near& token : s.near) masses.add(highest - token.value, token.mass);
  double total = far;
  for (const double mass : masses.by_bin) total += mass;
  const double wanted = top_p * total, doubt = 2.0 * error * total + rough * far;
  const size_t bin = masses.reach(wanted, larger);
  if (static_cast<float>(bin + 1) / coarse >= near) return std::numeric_limits<float>::quiet_NaN();  // from it on, tokens may count as far
  Masses finer{static_cast<float>(bin) / coarse, fine};
  std::erase_if(s.near, [&](const Near& token) { return masses.bin_of(highest - token.value) != bin; });
  for (const Near& token : s.near) finer.add(highest - token.value, token.mass);
  const size_t part = finer.reach(wanted, larger);
  std::erase_if(s.near, [&](const Near& token) { return finer.bin_of(highest - token.value) != part; });
  std::sort(s.near.begin(), s.near.end(), [](const Near& a, const Near& b) { return a.value > b.value; });
  for (const Near& token : s.near) {
    if (larger > wanted - doubt) break;
    larger += exponential(static_cast<double>(token.value - highest));
    if (larger > wanted + doubt) return token.value;
  }
  return std::numeric_limits<float>::quiet_NaN();
}

constexpr float usual = 6.0f, farthest = 15.0f;  // how far below the highest value the wanted mass is usually reached; as far as bins tell

// Whether many blocks lie so far below the highest value that nothing of them is usually wanted.
bool is_peaked(const Scratch& s, float highest) {
  const auto num_near = std::count_if(s.maxima.begin(), s.maxima.end(), [&](float maximum) { return maximum >= highest - usual; });
  return num_near * 10 < static_cast<int64_t>(s.maxima.size()) * 9;
}

// What `nucleus` returns, where it lies in few blocks near the highest value and no bound of an error leaves a doubt; else NaN.
float small_nucleus(Scratch& s, float highest, float threshold, double top_p) {
  return is_peaked(s, highest) ? quick_nucleus<float>(s, highest, threshold, top_p, 3e-7, usual)
                               : std::numeric_limits<float>::quiet_NaN();
}

// The smallest value that top_p keeps among those of at least `threshold`: the mass of all larger ones is less than top_p of the whole.
// Sums are float64, in order of token within a bin, and of bins.
float nucleus(Scratch& s, float highest, float threshold, double top_p) {
  float quick = quick_nucleus<float>(s, highest, threshold, top_p, 3e-7, farthest);
  if (quick != quick) quick = quick_nucleus<double>(s, highest, threshold, top_p, 1e-10, farthest);
  if (quick == quick) return quick;
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

// Of min_p and top_k.
float threshold_of(const SampleRow& row, Scratch& s, float highest) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  float threshold = -infinity;
  if (row.min_p > 0.0f) threshold = highest + std::log(row.min_p);
  if (row.top_k > 0 && row.top_k < size) threshold = std::max(threshold, kth_largest(s, highest, row.top_k));
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

float bound_of(float highest, double best) { return static_cast<float>(std::exp(std::min(static_cast<double>(highest) - best, 80.0))) * 1.0001f; }

// At most 1 − u, and short of it by less than 2⁻²⁰ of itself and 2⁻³¹: of the 31 leading bits of the noise alone.
INLINE float distance_from_one(uint32_t leading) {
  return static_cast<float>(static_cast<int32_t>(0x7fffffffu - leading)) * (0x1p-31f * (1.0f - 0x1p-21f));
}
INLINE uint32_t leading_bits(uint64_t key, int64_t token) { return static_cast<uint32_t>(noise_bits(key, token) >> 21); }

// Whether a token of this weight, exp(value − highest), may still win: its noise −log(−log u) lifts it above `best` only if
// −log u < weight · exp(highest − best), and 1 − u ≤ −log u; 1 − u needs no logarithm. `bound` is exp(highest − best), a little more.
INLINE bool may_win(float weight, float bound, uint32_t leading) { return distance_from_one(leading) <= weight * bound; }

// Marks tokens of a block that reach the threshold and, where there are many, may still win; returns how many. `weights` may be null.
INLINE int64_t candidates(const float* values, const float* weights, float highest, float threshold, float bound, uint64_t key, int64_t first,
                          int32_t* marks) {
  constexpr int64_t few = block / 8;
  int32_t found = 0;
  for (int64_t i = 0; i < block; ++i) {
    marks[i] = values[i] >= threshold;
    found += marks[i];
  }
  if (found <= few) return found;
  alignas(64) float own[block];
  if (weights == nullptr) weigh(values, highest, own);
  const float* const of_tokens = weights == nullptr ? own : weights;
  alignas(64) uint32_t leading[block];
  for (int64_t i = 0; i < block; ++i) leading[i] = leading_bits(key, first + i);
  found = 0;
  for (int64_t i = 0; i < block; ++i) {
    marks[i] &= may_win(of_tokens[i], bound, leading[i]);
    found += marks[i];
  }
  return found;
}

// The token with the largest value plus noise among those of at least `threshold`. `weights`: of all tokens, exp(value − highest), or null.
int64_t draw(const Scratch& s, const float* weights, float highest, float threshold, uint64_t key) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  const int64_t start = (std::find(s.maxima.begin(), s.maxima.end(), highest) - s.maxima.begin()) * block;
  const int64_t likeliest = std::find(s.scaled.begin() + start, s.scaled.end(), highest) - s.scaled.begin();
  Best best{highest + gumbel(noise_bits(key, likeliest)), likeliest};
  std::array<int32_t, block> marks;
  float bound = bound_of(highest, best.score);
  for (int64_t first = 0; first < size; first += block) {
    const float maximum = s.maxima[static_cast<size_t>(first / block)];
    if (maximum < threshold || maximum == -infinity) continue;
    const float* const values = s.scaled.data() + first;
    const float* const of_block = weights == nullptr ? nullptr : weights + first;
    if (by_features([&]() ALWAYS_INLINE { return candidates(values, of_block, highest, threshold, bound, key, first, marks.data()); }) == 0)
      continue;
    for (int64_t i = 0; i < block; ++i)
      if (marks[static_cast<size_t>(i)] && values[i] > -infinity && may_win(exponential(values[i] - highest), bound, leading_bits(key, first + i)))
        best.offer(values[i] + gumbel(noise_bits(key, first + i)), first + i);
    bound = bound_of(highest, best.score);
  }
  return best.token;
}

// Weights of all tokens, and their sum over those of at least `threshold`.
INLINE double weigh_all(const float* values, float highest, float threshold, float* weights, int64_t size) {
  double total = 0.0;
  for (int64_t first = 0; first < size; first += block) {
    weigh(values + first, highest, weights + first);
    total += mass_from(values + first, weights + first, threshold);
  }
  return total;
}

// Draws from the nucleus without finding it: the token that wins among all is the one if the mass of larger values is below top_p of the
// whole; otherwise the nucleus lies among these, and they are drawn from next: 1 − log(top_p) times on average. `nucleus` says what the
// nucleus is where the rough sums leave a doubt.
int64_t draw_from_nucleus(Scratch& s, float highest, float threshold, double top_p, uint64_t key) {
  const auto size = static_cast<int64_t>(s.scaled.size());
  s.rough_weights.resize(s.scaled.size());
  const float* const values = s.scaled.data();
  float* const weights = s.rough_weights.data();
  const double total = by_features([&]() ALWAYS_INLINE { return weigh_all(values, highest, threshold, weights, size); });
  const double wanted = top_p * total, doubt = 2.0 * rough * total;
  for (float smallest = threshold;;) {
    const int64_t token = draw(s, weights, highest, smallest, key);
    smallest = std::nextafter(values[token], infinity);
    double larger = 0.0;
    for (int64_t first = 0; first < size; first += block)
      if (s.maxima[static_cast<size_t>(first / block)] >= smallest)
        larger += by_features([&]() ALWAYS_INLINE { return mass_from(values + first, weights + first, smallest); });
    if (larger + doubt < wanted) return token;
    if (larger - doubt <= wanted) return draw(s, nullptr, highest, nucleus(s, highest, threshold, top_p), key);
  }
}

}  // namespace

int64_t sample(const SampleRow& row, int64_t vocabulary) {
  thread_local Scratch s;
  s.maxima.resize(static_cast<size_t>((vocabulary + block - 1) / block));
  s.scaled.resize(s.maxima.size() * static_cast<size_t>(block));
  const float highest =
      by_features([&]() ALWAYS_INLINE { return scale(row.logits, row.temperature, s.scaled.data(), s.maxima.data(), vocabulary); });
  if (!(std::abs(highest) < infinity)) return -1;
  const uint64_t key = noise_key(row.seed, row.index, row.position);
  float threshold = threshold_of(row, s, highest);
  if (row.top_p < 1.0) {
    const float smallest = small_nucleus(s, highest, threshold, row.top_p);
    if (smallest != smallest) return draw_from_nucleus(s, highest, threshold, row.top_p, key);
    threshold = smallest;
  }
  return draw(s, nullptr, highest, threshold, key);
}

}  // namespace echelon
