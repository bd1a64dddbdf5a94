// The kernels alone, without PyTorch, on random shapes under the address and undefined-behaviour sanitisers: `make sanitize`.
// A file of checks per file of kernels; main.cpp lists them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "../linear/linear.h"

namespace harness {

using Random = std::mt19937_64;

inline int64_t between(Random& random, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); }

// Unlike assert, also without a debug build.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

// Exactly `bytes` on the heap, aligned to a cache line; one byte too far is seen.
class Bytes {
 public:
  explicit Bytes(int64_t bytes) : data_(nullptr) {
    expect(posix_memalign(&data_, 64, bytes > 0 ? bytes : 1) == 0, "memory");
  }
  Bytes(const Bytes&) = delete;
  ~Bytes() { std::free(data_); }
  template <class T = char>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

// Normally distributed numbers.
void fill(Random& random, char* data, int64_t count, echelon::Storage type);
// A linear layer by all workers, one after the other, as threads would.
void run(const echelon::linear::Problem& problem, const echelon::linear::Family& family, int64_t parts);

void check_layer(Random& random);
void check_linear(Random& random);
void check_integers(Random& random);
void check_rounded_weight(Random& random);
void check_attention(Random& random);
void check_division(Random& random);
void check_elementwise(Random& random);
void check_sample(Random& random);
void check_rank(Random& random);  // one random case each

}  // namespace harness
