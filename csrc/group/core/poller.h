#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "base/mutex.h"

namespace nvx {

/// Looks at something again and again on a thread of the pool, for as long as there is something to look at: none is
/// needed while nothing is under way.
class Poller : public std::enable_shared_from_this<Poller> {
 public:
  struct Seen {
    bool more = false;          ///< something is left to be looked at
    std::function<void()> act;  ///< what is to be done about what was seen; empty: nothing
  };
  /// How long the thread sleeps between two looks: the first pauses after something was seen, and the others.
  struct Pace {
    std::chrono::microseconds first, later;
  };
  static constexpr Pace kSoon{std::chrono::microseconds(20), std::chrono::microseconds(100)};

  /// look: called by one thread at a time, with no lock held. It keeps nothing alive that may end while it looks, but
  /// for the time of a call.
  Poller(std::function<Seen()> look, Pace pace) : look_(std::move(look)), pace_(pace) {}

  /// There is something to look at: at least one look follows. False if there is no thread for that.
  bool wake() EXCLUDES(mutex_);

 private:
  bool find_thread() REQUIRES(mutex_);
  void poll() EXCLUDES(mutex_);

  const std::function<Seen()> look_;
  const Pace pace_;
  Mutex mutex_;
  bool polling_ GUARDED_BY(mutex_) = false;  // a job of the pool polls
  bool woken_ GUARDED_BY(mutex_) = false;    // since its last look began
};

}  // namespace nvx
