#include "base/flag.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace nvx {

void ring(Flag& flag) {
  flag.bell.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, &flag.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t this_core() { return uint32_t(sched_getcpu() + 1); }

bool YieldPolicy::should_yield() {
  const int skips = skips_.load(std::memory_order_relaxed);
  if (skips > 0) skips_.store(skips - 1, std::memory_order_relaxed);
  return skips <= 0;
}

void YieldPolicy::yield_core() {
  const auto went = Clock::now();
  sched_yield();
  const int next = next_skips_.load(std::memory_order_relaxed);
  if (Clock::now() - went < kLong) {
    if (next > kFewest) next_skips_.store(next - 1, std::memory_order_relaxed);
    return;
  }
  skips_.store(next, std::memory_order_relaxed);
  next_skips_.store(std::min(2 * next, kMost), std::memory_order_relaxed);
}

void signal(Flag& flag, Stamp value) {
  flag.core.store(this_core(), std::memory_order_relaxed);
  // Sequentially consistent with the sleeper, which increments `sleepers` and checks again: one sees the other's store.
  flag.value.store(value, std::memory_order_seq_cst);
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0) ring(flag);
}

void sleep_on(Flag& flag, uint32_t seen, Clock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(until - Clock::now());
  const auto span = std::clamp<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(1), kWatchInterval);
  const timespec time{0, long(span.count())};
  syscall(SYS_futex, &flag.bell, FUTEX_WAIT, seen, &time, nullptr, 0);
}

}  // namespace nvx
