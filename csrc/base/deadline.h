#pragma once

#include <chrono>

namespace nvx {

using Clock = std::chrono::steady_clock;

/// When a wait must have ended, and when the operation that waits began.
struct Deadline {
  Clock::time_point start = Clock::now();
  Clock::time_point end = Clock::time_point::max();

  static Deadline after(std::chrono::milliseconds span) {
    const auto now = Clock::now();
    const bool forever = span.count() <= 0 || span > std::chrono::hours(24 * 365);
    return {now, forever ? Clock::time_point::max() : now + span};
  }
  bool passed(Clock::time_point now) const { return now >= end; }
  double elapsed_s() const { return std::chrono::duration<double>(Clock::now() - start).count(); }
};

/// What besides time can end a wait. Asked about fifty times a second by a waiter that sleeps, so it may make system
/// calls.
class Watch {
 public:
  virtual ~Watch() = default;
  /// True when waiting for this peer (-1: for any) has become pointless. The waiter then looks a last time, for what
  /// the peer did before it went.
  virtual bool alarmed(int peer) = 0;
  /// Called where that last look was in vain: keeps the cause.
  virtual void alarm(int peer) = 0;
};

/// What a waiter moves along while it waits: what it waits for here may depend on what comes from another host.
class Driver {
 public:
  virtual ~Driver() = default;
  /// Moves what can be moved now. Called between two looks of a waiter that spins, and about a thousand times a second
  /// by one that sleeps.
  virtual void drive() = 0;
};

}  // namespace nvx
