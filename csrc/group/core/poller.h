#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "base/mutex.h"

namespace nvx {

/// Polls on a pool thread for as long as there is something to poll. Uses no thread otherwise.
class Poller : public std::enable_shared_from_this<Poller> {
 public:
  struct Seen {
    bool more = false;            ///< something is left to poll
    std::function<void()> act{};  ///< the reaction to it; empty: none
  };
  /// The sleep between two polls: `first` for the first pauses after a hit, `later` for the others.
  struct Pace {
    std::chrono::microseconds first, later;
  };
  static constexpr Pace kSoon{std::chrono::microseconds(20), std::chrono::microseconds(100)};

  /// `progress`: called by one thread at a time, with no lock held. It may refer to other objects only during a call.
  Poller(std::function<Seen()> progress, Pace pace) : progress_(std::move(progress)), pace_(pace) {}
  /// Polls an object for as long as it lives. `progress` returns a Seen, or whether something is left to poll.
  template <class T, class Result>
  static std::shared_ptr<Poller> of(std::weak_ptr<T> object, Result (T::*progress)(), Pace pace) {
    const auto poll = [object = std::move(object), progress] {
      const std::shared_ptr<T> there = object.lock();
      return there ? Seen{(there.get()->*progress)()} : Seen();
    };
    return std::make_shared<Poller>(poll, pace);
  }

  /// Requests a poll: at least one follows. False if there is no thread for it.
  bool wake() EXCLUDES(mutex_);

 private:
  bool find_thread() REQUIRES(mutex_);
  void poll() EXCLUDES(mutex_);

  const std::function<Seen()> progress_;
  const Pace pace_;
  Mutex mutex_;
  bool polling_ GUARDED_BY(mutex_) = false;  // a pool thread polls
  bool woken_ GUARDED_BY(mutex_) = false;    // since the last poll began
};

}  // namespace nvx
