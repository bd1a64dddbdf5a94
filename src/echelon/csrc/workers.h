// One of the threads that work on a call together, and how they share it out and wait for one another.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

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

// Things in order in equal shares: a worker takes chunks of its own, and then of what others have left, so that a slow core, or one that
// somebody else uses too, holds nobody up. The last one to two chunks of a share are taken in pieces of `least`: nobody waits for a whole one
// at the end.
class Shares {
 public:
  explicit Shares(int64_t parts) : next_(parts) {}

  // By every worker, before it waits for the others and takes: nobody takes meanwhile.
  void reset(Worker worker) { next_[worker.part].turn.store(0, std::memory_order_relaxed); }

  // Calls work(first, last) until none of `n` is left.
  template <typename Work>
  void take(Worker worker, int64_t n, int64_t chunk, int64_t least, const Work& work) {
    for (int64_t i = 0; i < worker.parts; ++i) {
      const Worker owner{(worker.part + i) % worker.parts, worker.parts};
      const int64_t start = owner.first(n), end = owner.last(n), whole = std::max<int64_t>((end - start) / chunk - 1, 0);
      while (true) {
        const int64_t turn = next_[owner.part].turn.fetch_add(1, std::memory_order_relaxed);
        const int64_t first = start + std::min(turn, whole) * chunk + std::max<int64_t>(turn - whole, 0) * least;
        if (first >= end) break;
        work(first, std::min(first + (turn < whole ? chunk : least), end));
      }
    }
  }

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> turn{0};
  };
  std::vector<Next> next_;
};

// Take the next of `count` things until none is left; `next` is shared by all workers and starts at 0.
template <typename Work>
void take_in_turn(std::atomic<int64_t>& next, int64_t count, const Work& work) {
  for (int64_t i = next++; i < count; i = next++) work(i);
}

}  // namespace echelon
