#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/deadline.h"

namespace nvx {

/// (epoch, step) as one number that only grows. Stamps are compared modularly, so they may wrap.
using Stamp = uint64_t;
constexpr Stamp stamp(uint32_t epoch, uint32_t step) { return (Stamp(epoch) << 32) | step; }
constexpr bool reached(Stamp value, Stamp want) { return int64_t(value - want) >= 0; }

/// A counter in shared memory. `value` has one writer; any number of threads may sleep on it.
struct Flag {
  std::atomic<Stamp> value;
  std::atomic<uint32_t> sleepers;  ///< the number of sleepers; if it is not 0, the writer of `value` must call ring()
  std::atomic<uint32_t> bell;      ///< the futex word; every ring() increments it
  std::atomic<uint32_t> core;      ///< a hint: 1 + the core on which the writer last ran; 0 before its first signal()
};
static_assert(sizeof(Flag) == 24 && std::atomic<Stamp>::is_always_lock_free);

/// Release: everything that this thread wrote before the call is visible to a thread that reads `value` or a later
/// stamp with acquire. Wakes the threads that sleep on the flag.
void signal(Flag& flag, Stamp value);

/// Wakes the threads that sleep on the flag without changing its value.
void ring(Flag& flag);

/// The adaptive spin time of the waits of a group. A spin that succeeds doubles it; a spin that fails, because the peer
/// or its core is busy, halves it. It never drops below a quarter of the maximum, which is about the time to wake a
/// sleeper: two ranks that spin for less would alternate between sleeping and waking as long as they communicate. A
/// lost update is harmless.
class SpinBudget {
 public:
  explicit SpinBudget(std::chrono::nanoseconds most) : most_(most), span_(most.count()) {}
  std::chrono::nanoseconds span() const { return std::chrono::nanoseconds(span_.load(std::memory_order_relaxed)); }
  void hit() { span_.store(std::min<int64_t>(span().count() * 2, most_.count()), std::memory_order_relaxed); }
  void miss() { span_.store(std::max<int64_t>(span().count() / 2, most_.count() / 4), std::memory_order_relaxed); }

 private:
  const std::chrono::nanoseconds most_;
  std::atomic<int64_t> span_;
};

/// Decides whether a waiter yields its core instead of sleeping. Between ranks that wait for each other, sched_yield()
/// returns within microseconds. Behind a thread that computes, it returns only when that thread's time slice ends,
/// which is slower than sleeping and being woken. So after a yield that took long the next waits sleep, and twice as
/// many of them after each further long yield. Shared by the waits of a group; a lost update is harmless.
class YieldPolicy {
 public:
  /// Whether this wait may yield. Call it once per wait, because it counts waits.
  bool should_yield();
  void yield_core();

 private:
  static constexpr std::chrono::milliseconds kLong{1};
  static constexpr int kFewest = 64, kMost = 4096;

  std::atomic<int> skips_{0};
  std::atomic<int> next_skips_{kFewest};
};

/// How long a wait spins, when it gives up, and what it checks meanwhile.
struct WaitRules {
  Deadline deadline;
  SpinBudget* spin = nullptr;  ///< null: do not spin
  Watch* watch = nullptr;
  Driver* driver = nullptr;       ///< null: this waiter has nothing to advance
  YieldPolicy* yields = nullptr;  ///< null: do not yield the core
  bool traced = false;            ///< `watch` records every wait that was not over at once
};

enum class Waited { kReached, kTimedOut, kAlarmed };

/// The interval at which a sleeper consults its `Watch`. It bounds how late a waiter notices a death or an abort.
inline constexpr std::chrono::milliseconds kWatchInterval{20};

/// Sleeps until a ring, `until` or the end of the watch interval. Returns at once if `bell` is no longer `seen`.
void sleep_on(Flag& flag, uint32_t seen, Clock::time_point until);

/// The longest sleep of a waiter with a `Driver`.
inline constexpr std::chrono::milliseconds kDriveInterval{1};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

/// 1 + the core that this thread runs on, or 0 if the system does not report it.
uint32_t this_core();

inline bool writer_is_on_this_core(const Flag& flag) {
  const uint32_t core = flag.core.load(std::memory_order_relaxed);
  return core != 0 && core == this_core();
}

class TracedWait {
 public:
  TracedWait(const WaitRules& rules, int peer)
      : watch_(rules.watch), peer_(peer), began_(watch_ && rules.traced ? Clock::now() : kNever) {}
  ~TracedWait() {
    if (began_ == kNever && asleep_ == kNever) return;
    const Clock::duration least(1), slept = asleep_ == kNever ? Clock::duration(0) : Clock::now() - asleep_ + least;
    watch_->waited(peer_, began_, slept);
  }
  TracedWait(const TracedWait&) = delete;

  void sleeps() {
    if (!watch_) return;
    asleep_ = Clock::now();
    watch_->sleeps(peer_);
  }

 private:
  static constexpr Clock::time_point kNever{};

  Watch* const watch_;
  const int peer_;
  const Clock::time_point began_;
  Clock::time_point asleep_{};
};

/// How long a waiter that must not spin yields its core before it sleeps.
inline constexpr std::chrono::microseconds kYieldFor{50};

/// Waits on a flag in shared memory. Returns when ready() is true or when the rules end the wait. It sleeps on the
/// flag, so the thread that makes ready() true must ring that flag. ready() must load with acquire; when wait() returns
/// kReached, everything that the signaller wrote before its signal() is visible to this thread.
template <class Ready>
Waited wait(Flag& flag, Ready ready, int peer, const WaitRules& rules) {
  if (ready()) return Waited::kReached;
  const bool may_yield = rules.yields && rules.yields->should_yield();
  for (int i = 0; rules.spin && i < 64; ++i) {
    if (ready()) return Waited::kReached;
    relax();
  }
  TracedWait traced(rules, peer);
  if (rules.spin) {
    const auto stop = Clock::now() + rules.spin->span();
    do {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return rules.spin->hit(), Waited::kReached;
        relax();
      }
      if (rules.driver) rules.driver->drive();
      // Two waiters that alternate on one core are never both runnable, so the scheduler does not separate them
      // although another core idles. Yielding is faster and shows the scheduler that both are runnable.
      if (may_yield && writer_is_on_this_core(flag)) rules.yields->yield_core();
    } while (Clock::now() < stop);
    rules.spin->miss();
  } else if (may_yield) {
    const auto stop = Clock::now() + kYieldFor;
    do {
      rules.yields->yield_core();
      if (ready()) return Waited::kReached;
      if (rules.driver) rules.driver->drive();
    } while (Clock::now() < stop);
  }
  traced.sleeps();
  auto next_check = Clock::time_point::min();
  for (;;) {
    if (rules.driver) rules.driver->drive();
    const auto until = rules.driver ? std::min(rules.deadline.end, Clock::now() + kDriveInterval) : rules.deadline.end;
    const uint32_t bell = flag.bell.load(std::memory_order_acquire);
    // Before the last check: a signaller whose value this check misses sees `sleepers`.
    flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const bool now = ready();
    if (!now) sleep_on(flag, bell, until);
    flag.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (now || ready()) return Waited::kReached;
    if (rules.driver && Clock::now() < next_check && !rules.deadline.passed(Clock::now())) continue;
    next_check = Clock::now() + kWatchInterval;
    if (rules.watch && rules.watch->should_abort(peer)) {
      if (ready()) return Waited::kReached;
      rules.watch->record_abort(peer);
      return Waited::kAlarmed;
    }
    if (rules.deadline.passed(Clock::now())) return ready() ? Waited::kReached : Waited::kTimedOut;
  }
}

/// Acquire: waits until the flag reaches `want`. All that its writer wrote before that signal() is then visible here.
inline Waited wait(Flag& flag, Stamp want, int peer, const WaitRules& rules) {
  return wait(
      flag, [&] { return reached(flag.value.load(std::memory_order_seq_cst), want); }, peer, rules);
}

}  // namespace nvx
