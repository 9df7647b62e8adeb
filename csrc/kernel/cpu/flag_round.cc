#include "kernel/cpu/flag_round.h"

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace nvx {
namespace {

struct Counters {
  alignas(128) std::atomic<uint64_t> sent;      // written by side 0
  alignas(128) std::atomic<uint64_t> answered;  // written by side 1
};
static_assert(sizeof(Counters) == kFlagRoundBytes && std::atomic<uint64_t>::is_always_lock_free);

// No pause instruction between the loads: its length differs tenfold between processors and would dominate.
bool reaches(const std::atomic<uint64_t>& count, uint64_t want, Clock::time_point end) {
  for (;;) {
    for (int polls = 0; polls < 4096; ++polls)
      if (count.load(std::memory_order_acquire) == want) return true;
    if (Clock::now() > end) return false;
  }
}

}  // namespace

std::chrono::duration<double> flag_round(void* shared, int side, int rounds, std::chrono::milliseconds timeout) {
  auto& counters = *static_cast<Counters*>(shared);
  auto& mine = side == 0 ? counters.sent : counters.answered;
  auto& theirs = side == 0 ? counters.answered : counters.sent;
  uint64_t count = mine.load(std::memory_order_relaxed);  // the value that an earlier call on this side left
  auto began = Clock::now();
  for (int round = 0; round <= rounds; ++round) {
    ++count;
    if (side == 0) mine.store(count, std::memory_order_release);
    if (!reaches(theirs, count, Clock::now() + timeout)) return std::chrono::duration<double>(-1);
    if (side == 1) mine.store(count, std::memory_order_release);
    if (round == 0) began = Clock::now();  // the first round also waits for the other side to arrive
  }
  return std::chrono::duration<double>(Clock::now() - began) / rounds;
}

}  // namespace nvx
