#include "ranks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace echelon {
namespace {

// As parallel/rank_memory.py has them: how many numbers a rank has, and where each lies among them. Bytes written are of this gather and of the
// one before, by turns: who is further than this rank is one further at most.
constexpr int64_t line = 8, arrived = 0, hash = 2, written = 5;
constexpr long look_nanoseconds = 50'000'000;

uint64_t read(const uint64_t* number) { return std::atomic_ref<const uint64_t>(*number).load(std::memory_order_acquire); }
void set(uint64_t* number, uint64_t value) { std::atomic_ref<uint64_t>(*number).store(value, std::memory_order_release); }

void wake(uint64_t* number, int64_t most) {
#if defined(__linux__)
  syscall(SYS_futex, number, FUTEX_WAKE, static_cast<int>(most), nullptr, nullptr, 0);
#endif
}

// Until the number may have changed, or a while has passed.
void sleep_on(uint64_t* number, uint64_t seen) {
#if defined(__linux__)
  const timespec limit{0, look_nanoseconds};
  syscall(SYS_futex, number, FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
#endif
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void Gathers::begin() {
  if (!ranks_.numbers || !ranks_.is_owed) return;
  const std::optional<uint64_t> plan = std::exchange(ranks_.plan, std::nullopt);  // others may not have begun with it
  wait(read(ranks_.numbers + ranks_.rank * line + written + ranks_.count % 2));
  ranks_.plan = plan;
}

void Gathers::write(uint64_t bytes) {
  uint64_t* const own = ranks_.numbers + ranks_.rank * line;
  set(own + written + ranks_.count % 2, bytes);
  set(own + arrived, ranks_.count);
  wake(own + arrived, ranks_.size);
}

// Until the others have written as often as this rank, and the same.
void Gathers::wait(uint64_t bytes) {
  for (int64_t rank = 0; rank < ranks_.size && !has_failed_; ++rank) {
    if (rank == ranks_.rank) continue;
    uint64_t* const number = ranks_.numbers + rank * line + arrived;
    for (int64_t i = 0; i < ranks_.spins && read(number) < ranks_.count; ++i) pause();
    for (uint64_t seen; !has_failed_ && (seen = read(number)) < ranks_.count;) {
      sleep_on(number, seen);
      has_failed_ = ranks_.gives_up(-1);
    }
    if (has_failed_) return;
    const uint64_t* const own = number - arrived;
    const bool is_same = read(own + written + ranks_.count % 2) == bytes && (!ranks_.plan || read(own + hash) == *ranks_.plan);
    if (!is_same || read(number) > ranks_.count + 1) has_failed_ = ranks_.gives_up(rank);
  }
  ranks_.plan.reset();
}

const char* Gathers::gather(Worker worker, const char* own, int64_t rows, int64_t columns, Columns place, int64_t size) {
  char* const slot = ranks_.slots[ranks_.count % 2];
  const int64_t width = place.whole * size, own_width = columns * size, first = place.first * size;
  for (int64_t row = worker.first(rows); row < worker.last(rows); ++row) {
    if (!ranks_.numbers) std::memset(slot + row * width, 0, static_cast<size_t>(width));
    std::memcpy(slot + row * width + first, own + row * own_width, static_cast<size_t>(own_width));
  }
  worker.wait();
  if (worker.part == 0) {
    ++ranks_.count;
    if (ranks_.numbers && !has_failed_) {
      const uint64_t bytes = static_cast<uint64_t>(rows * width);
      write(bytes);
      wait(bytes);
    }
  }
  worker.wait();
  return slot;
}

}  // namespace echelon
