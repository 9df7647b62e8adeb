#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace nvx {

/// (epoch, step) in one number that only grows; compared modularly, so it may wrap.
using Stamp = uint64_t;
constexpr Stamp stamp(uint32_t epoch, uint32_t step) { return (Stamp(epoch) << 32) | step; }
constexpr bool reached(Stamp value, Stamp want) { return int64_t(value - want) >= 0; }

/// A counter in memory that several processes share: one writer of value, any number of sleepers.
struct Flag {
  std::atomic<Stamp> value;
  std::atomic<uint32_t> sleepers;  ///< how many sleep: whoever raises the value must ring for them
  std::atomic<uint32_t> bell;      ///< the futex word: moves with every ring
  std::atomic<uint32_t> core;      ///< a hint: 1 + where the writer last ran; 0 before it has written
};
static_assert(sizeof(Flag) == 24 && std::atomic<Stamp>::is_always_lock_free);

/// Everything this thread wrote before is visible to whoever sees the value. Wakes those who sleep on the flag.
void signal(Flag& flag, Stamp value);

/// Wakes those who sleep on the flag though its value has not moved.
void ring(Flag& flag);

/// How long spinning has paid lately: doubled when a spin ended well, halved when it was in vain, because the peer is
/// busy or its core is. Never less than a quarter, which is about what waking a sleeper takes: two ranks that spin for
/// less than that take turns at sleeping for as long as they talk. Shared by the waits of a group; a lost update does
/// not matter.
class Patience {
 public:
  explicit Patience(std::chrono::nanoseconds most) : most_(most), span_(most.count()) {}
  std::chrono::nanoseconds span() const { return std::chrono::nanoseconds(span_.load(std::memory_order_relaxed)); }
  void paid() { span_.store(std::min<int64_t>(span().count() * 2, most_.count()), std::memory_order_relaxed); }
  void in_vain() { span_.store(std::max<int64_t>(span().count() / 2, most_.count() / 4), std::memory_order_relaxed); }

 private:
  const std::chrono::nanoseconds most_;
  std::atomic<int64_t> span_;
};

/// Whether a waiter yields its core instead of sleeping. Among ranks that wait for each other, a thread that yields is
/// back on its core within microseconds. Behind a thread that computes, it is back only when that thread's time slice
/// is over, which is worse than to sleep and be woken. So after a yield that took long the next waits sleep, and twice
/// as many of them if it happens again. Shared by the waits of a group; a lost update does not matter.
class Courtesy {
 public:
  /// Whether this wait may yield. Called once for each wait, as it counts them.
  bool offers();
  void yield_core();

 private:
  static constexpr std::chrono::milliseconds kLong{1};
  static constexpr int kFewest = 64, kMost = 4096;

  std::atomic<int> skips_{0};
  std::atomic<int> next_skips_{kFewest};
};

/// How long to spin before sleeping, when to give up, and whom to ask meanwhile.
struct WaitRules {
  Deadline deadline;
  Patience* patience = nullptr;  ///< null: do not spin
  Watch* watch = nullptr;
  Driver* driver = nullptr;      ///< null: nothing else depends on this waiter
  Courtesy* courtesy = nullptr;  ///< null: do not yield the core
};

enum class Waited { kReached, kTimedOut, kAlarmed };

/// The interval at which a sleeper asks its watch; bounds how late a death or an abort is noticed.
inline constexpr std::chrono::milliseconds kWatchInterval{20};

/// Sleeps on the flag until it is rung, `until` has come or the watch interval has passed. Returns at once if its bell
/// has moved since `seen` was read.
void sleep_on(Flag& flag, uint32_t seen, Clock::time_point until);

/// The longest sleep of a waiter that has something to drive.
inline constexpr std::chrono::milliseconds kDriveInterval{1};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

/// 1 + the core that this thread runs on; 0 where the system does not say.
uint32_t this_core();

inline bool writer_is_on_this_core(const Flag& flag) {
  const uint32_t core = flag.core.load(std::memory_order_relaxed);
  return core != 0 && core == this_core();
}

/// How long a waiter that must not spin yields its core, again and again, before it sleeps.
inline constexpr std::chrono::microseconds kYieldFor{50};

/// The one way to wait: returns when ready() has become true, or the rules say to give up. It sleeps on the flag, which
/// must be rung by whoever makes ready() true. ready() must load with acquire; once it was true, everything that was
/// written before the matching signal() is visible.
template <class Ready>
Waited wait(Flag& flag, Ready ready, int peer, const WaitRules& rules) {
  if (ready()) return Waited::kReached;
  const bool courteous = rules.courtesy && rules.courtesy->offers();
  if (rules.patience) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return Waited::kReached;
      relax();
    }
    const auto stop = Clock::now() + rules.patience->span();
    do {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return rules.patience->paid(), Waited::kReached;
        relax();
      }
      if (rules.driver) rules.driver->drive();
      // Two that spin and sleep in turns on one core are never both ready to run, so the scheduler sees no reason to
      // part them, while another core idles. Yielding is faster, and shows the scheduler that there are two.
      if (courteous && writer_is_on_this_core(flag)) rules.courtesy->yield_core();
    } while (Clock::now() < stop);
    rules.patience->in_vain();
  } else if (courteous) {
    const auto stop = Clock::now() + kYieldFor;
    do {
      rules.courtesy->yield_core();
      if (ready()) return Waited::kReached;
      if (rules.driver) rules.driver->drive();
    } while (Clock::now() < stop);
  }
  auto next_look = Clock::time_point::min();
  for (;;) {
    if (rules.driver) rules.driver->drive();
    const auto until = rules.driver ? std::min(rules.deadline.end, Clock::now() + kDriveInterval) : rules.deadline.end;
    const uint32_t bell = flag.bell.load(std::memory_order_acquire);
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);  // before the last look: a signaller that we miss sees us
    const bool now = ready();
    if (!now) sleep_on(flag, bell, until);
    flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (now || ready()) return Waited::kReached;
    if (rules.driver && Clock::now() < next_look && !rules.deadline.passed(Clock::now())) continue;
    next_look = Clock::now() + kWatchInterval;
    if (rules.watch && rules.watch->alarmed(peer)) {
      if (ready()) return Waited::kReached;
      rules.watch->alarm(peer);
      return Waited::kAlarmed;
    }
    if (rules.deadline.passed(Clock::now())) return ready() ? Waited::kReached : Waited::kTimedOut;
  }
}

/// Waits until the flag has reached a stamp. What its writer wrote before that signal is then visible here.
inline Waited wait(Flag& flag, Stamp want, int peer, const WaitRules& rules) {
  return wait(
      flag, [&] { return reached(flag.value.load(std::memory_order_seq_cst), want); }, peer, rules);
}

}  // namespace nvx
