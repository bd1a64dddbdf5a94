// One of the threads that work on a call together, and how they share it out and wait for one another.
#pragma once

#include <atomic>
#include <cstdint>

namespace echelon {

struct Worker {
  int64_t part = 0, parts = 1;

  // Of `n` things in order, this worker's are those from first(n) to last(n) − 1.
  int64_t first(int64_t n) const { return n * part / parts; }
  int64_t last(int64_t n) const { return n * (part + 1) / parts; }

  // Return when every worker has come here; what they wrote before is seen after.
  void wait() const {
    if (parts > 1) {
#pragma omp barrier
    }
  }
};

// Take the next of `count` things until none is left; `next` is shared by all workers and starts at 0.
template <typename Work>
void take_in_turn(std::atomic<int64_t>& next, int64_t count, const Work& work) {
  for (int64_t i = next++; i < count; i = next++) work(i);
}

}  // namespace echelon
