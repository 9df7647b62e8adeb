#pragma once

#include <chrono>

namespace nvx {

using Clock = std::chrono::steady_clock;

/// The end of a wait, and the start of the operation that waits.
struct Deadline {
  Clock::time_point start = Clock::now();
  Clock::time_point end = Clock::time_point::max();

  /// A longer span makes no difference, and this one does not overflow in nanoseconds.
  static constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365 * 100);

  static Deadline after(std::chrono::milliseconds span) {
    const auto now = Clock::now();
    const bool forever = span.count() <= 0 || span > std::chrono::hours(24 * 365);
    return {now, forever ? Clock::time_point::max() : now + span};
  }
  bool passed(Clock::time_point now) const { return now >= end; }
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start).count(); }
};

/// Ends a wait for another reason than time. A sleeper calls it about 50 times a second, so it may make system calls.
class Watch {
 public:
  virtual ~Watch() = default;
  /// True when waiting for this peer (-1: any) is pointless. The waiter then checks its condition once more.
  virtual bool should_abort(int peer) = 0;
  /// Called when that last check failed. Records the cause.
  virtual void record_abort(int peer) = 0;
  /// A wait for this peer (-1: for any) begins to sleep after its spin.
  virtual void sleeps(int /*peer*/) {}
  /// A wait that slept, or that is traced, is over. `began`: before its spin; the epoch if it is not traced. `slept`: 0
  /// if it did not.
  virtual void waited(int /*peer*/, Clock::time_point /*began*/, Clock::duration /*slept*/) {}
};

/// Work that a waiter advances while it waits, because the awaited event may depend on messages from another host.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Advances without blocking. A spinner calls it between checks, a sleeper about a thousand times a second.
  virtual void drive() = 0;
};

}  // namespace nvx
