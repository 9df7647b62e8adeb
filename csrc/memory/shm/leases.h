#pragma once

#include <atomic>
#include <vector>

#include "base/mutex.h"
#include "memory/shm/spans.h"

namespace nvx {

/// Somebody who keeps a lease between operations because that is faster, and can be asked to give it up.
class LeaseHolder {
 public:
  virtual ~LeaseHolder() = default;
  /// Gives up a span that is idle and that no peer still reads; an empty one if it has none. Never blocks.
  virtual Span yield() = 0;
};

/// The staging memory of a process, shared by all its groups and bounded. A lease is never refused, only made smaller:
/// so that no group waits for memory that another one holds, which could go round in a circle over several ranks.
class LeasePool {
 public:
  static constexpr size_t kSmallest = 256 << 10;

  LeasePool(SpanSource& arena, size_t most) : arena_(arena), most_(most) {}

  Span acquire(size_t wanted, LeaseHolder* asker) EXCLUDES(mutex_);
  void release(Span span) EXCLUDES(mutex_);
  /// Takes back a span that peers may still read: it counts as leased until released() holds.
  void bury(Span span, std::function<bool()> released);

  void join(LeaseHolder* holder) EXCLUDES(mutex_);
  void leave(LeaseHolder* holder) EXCLUDES(mutex_);

 private:
  void reclaim(size_t wanted, const LeaseHolder* asker) REQUIRES(mutex_);

  SpanSource& arena_;
  const size_t most_;
  Mutex mutex_;
  std::atomic<size_t> leased_{0};                         // the buried ones too
  std::vector<LeaseHolder*> holders_ GUARDED_BY(mutex_);  // the one that leased longest ago first
};

}  // namespace nvx
