#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include "base/deadline.h"
#include "base/mutex.h"

namespace nvx {

/// Time added to the timeouts of a group's operations for a while. An addition applies to every operation that begins
/// afterwards, and ends with the first of these to end. Later additions add up, and end separately.
class TimeoutExtensions : public std::enable_shared_from_this<TimeoutExtensions> {
 public:
  /// While it lives, the time added between the starts of the previous operation and of this one stays. May be null.
  using Claim = std::shared_ptr<const void>;
  struct Share {
    std::chrono::milliseconds extra{0};
    Claim until_it_ends;
  };

  void add(std::chrono::milliseconds span) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const int64_t most = Deadline::kForever.count();
    sum_.store(std::min(sum_.load() + std::clamp<int64_t>(span.count(), 0, most), most));
  }

  /// Call when an operation begins.
  Share begin() EXCLUDES(mutex_) {
    if (sum_.load(std::memory_order_relaxed) == 0) [[likely]]
      return {};
    MutexLock lock(mutex_);
    const int64_t sum = sum_.load(), unclaimed = sum - claimed_;
    if (unclaimed == 0) return {std::chrono::milliseconds(sum), nullptr};
    claimed_ = sum;
    return {std::chrono::milliseconds(sum), std::make_shared<const Owner>(shared_from_this(), unclaimed)};
  }

 private:
  struct Owner {
    Owner(std::shared_ptr<TimeoutExtensions> whose, int64_t span) : whose(std::move(whose)), span(span) {}
    ~Owner() { whose->end(span); }
    Owner(const Owner&) = delete;

    const std::shared_ptr<TimeoutExtensions> whose;
    const int64_t span;
  };

  void end(int64_t span) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    sum_.store(sum_.load() - span);
    claimed_ -= span;
  }

  Mutex mutex_;
  std::atomic<int64_t> sum_{0};  // milliseconds; written with the lock held
  int64_t claimed_ GUARDED_BY(mutex_) = 0;
};

}  // namespace nvx
