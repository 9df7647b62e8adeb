#include "base/flag_round.h"

#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace nvx {
namespace {

struct Court {
  alignas(128) std::atomic<uint64_t> serves;   // written by side 0
  alignas(128) std::atomic<uint64_t> returns;  // written by side 1
};
static_assert(sizeof(Court) == kFlagRoundBytes && std::atomic<uint64_t>::is_always_lock_free);

// There is no pause between the looks: its length differs by a factor of ten between processors, so the pause is what
// would be measured.
bool comes(const std::atomic<uint64_t>& ball, uint64_t want, Clock::time_point end) {
  for (;;) {
    for (int look = 0; look < 4096; ++look)
      if (ball.load(std::memory_order_acquire) == want) return true;
    if (Clock::now() > end) return false;
  }
}

}  // namespace

std::chrono::duration<double> flag_round(void* shared, int side, int rounds, std::chrono::milliseconds patience) {
  auto& court = *static_cast<Court*>(shared);
  auto& mine = side == 0 ? court.serves : court.returns;
  auto& theirs = side == 0 ? court.returns : court.serves;
  uint64_t ball = mine.load(std::memory_order_relaxed);  // where an earlier call of this side left it
  auto began = Clock::now();
  for (int round = 0; round <= rounds; ++round) {
    ++ball;
    if (side == 0) mine.store(ball, std::memory_order_release);
    if (!comes(theirs, ball, Clock::now() + patience)) return std::chrono::duration<double>(-1);
    if (side == 1) mine.store(ball, std::memory_order_release);
    if (round == 0) began = Clock::now();  // the first round waits for the other side to come
  }
  return std::chrono::duration<double>(Clock::now() - began) / rounds;
}

}  // namespace nvx
