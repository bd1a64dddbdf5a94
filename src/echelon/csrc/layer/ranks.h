// Processes of one machine that each compute some columns of a layer, and bring them together in memory that all have.
// parallel/rank_memory.py and parallel/exchange.py say how that memory is used; here is the same for layers that run in one call.
#pragma once

#include <cstdint>
#include <optional>

#include "../workers.h"

namespace echelon {

// Of rows of `whole` numbers those from `first` on, as many as a rank computes. whole 0: it computes all.
struct Columns {
  int64_t first = 0, whole = 0;
};

// This process among the ranks that run a pass.
struct Ranks {
  uint64_t* numbers = nullptr;  // `line` of each rank, of which nobody else writes; null: no other rank runs this pass, what they would give is 0
  char* slots[2] = {};          // of `slot_bytes`, aligned to 64
  int64_t slot_bytes = 0, rank = 0, size = 1;
  uint64_t count = 0;            // gathers that this rank has written
  bool is_owed = false;          // did it not wait for the others in the last one?
  std::optional<uint64_t> plan;  // the hash that all ranks must have, until it has been compared
  int64_t spins = 0;             // looks at a number before the processor is given up
  // Asked while another rank is awaited (−1), or about one that runs something else: shall this one give up?
  int (*gives_up)(int64_t rank) = nullptr;
};

// The gathers of one call. Once one has failed none waits any more, and what they give is meaningless.
class Gathers {
 public:
  explicit Gathers(const Ranks& ranks) : ranks_(ranks) {}

  // Before the first: all have read what this rank has written.
  void begin();
  // Numbers of `size` bytes: this rank's own [rows, columns] → [rows, whole], which the gather after the next overwrites. By every worker,
  // after `own` is complete.
  const char* gather(Worker worker, const char* own, int64_t rows, int64_t columns, Columns place, int64_t size);
  bool has_failed() const { return has_failed_; }
  int64_t slot_bytes() const { return ranks_.slot_bytes; }

 private:
  void write(uint64_t bytes);
  void wait(uint64_t bytes);

  Ranks ranks_;
  bool has_failed_ = false;  // written by the first worker alone, before the others go on
};

}  // namespace echelon
