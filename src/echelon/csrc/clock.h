// Where the time of a pass goes, clocked inside the calls: what a benchmark reads before and after a pass.
#pragma once

#include <chrono>

namespace echelon {

enum class Part { linear, attention };

// Seconds that calls from this thread have spent in each part.
inline thread_local double seconds_in[2];

// Adds the time of its life to a part.
class Clocked {
 public:
  explicit Clocked(Part part) : part_(part), start_(std::chrono::steady_clock::now()) {}
  Clocked(const Clocked&) = delete;
  ~Clocked() { seconds_in[static_cast<int>(part_)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  Part part_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace echelon
