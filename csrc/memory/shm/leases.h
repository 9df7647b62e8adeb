#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/mutex.h"
#include "memory/shm/arena.h"

namespace nvx {

/// A holder that keeps a lease between operations, for speed, and gives it up on request.
class LeaseHolder {
 public:
  virtual ~LeaseHolder() = default;
  /// Gives up a span that is idle and that no peer still reads, or returns an empty one. Never blocks.
  virtual Span release_idle() = 0;
};

/// The bounded staging memory of a process, shared by all its groups. A lease may be smaller than wanted, and is
/// refused only if the arena has no `kSmallest` bytes left. So no group waits for memory that another group holds,
/// which could deadlock across ranks.
class LeasePool {
 public:
  static constexpr size_t kSmallest = 256 << 10;

  /// `most`: at most half of the arena.
  LeasePool(Arena& arena, size_t most) : arena_(arena), most_(std::min(most, Arena::kBytes / 2)) {}
  /// The bytes that others must leave free in the arena, so that no operation of an existing group fails without them.
  size_t unleased() const { return most_ - std::min<size_t>(most_, leased_); }

  /// Leases `wanted` bytes. If fewer are free, at most `least` bytes, for which leases of other holders are reclaimed.
  Span acquire(size_t wanted, size_t least, LeaseHolder* requester) EXCLUDES(mutex_);
  void release(Span span) EXCLUDES(mutex_);
  /// Returns a span that peers may still read. It counts as leased until released() returns true.
  void free_when(Span span, std::function<bool()> released);

  void join(LeaseHolder* holder) EXCLUDES(mutex_);
  void leave(LeaseHolder* holder) EXCLUDES(mutex_);

 private:
  void reclaim(size_t wanted, const LeaseHolder* requester) REQUIRES(mutex_);
  Span allocate(size_t bytes);

  Arena& arena_;
  const size_t most_;
  Mutex mutex_;
  std::atomic<size_t> leased_{0};                         // retired spans included
  std::vector<LeaseHolder*> holders_ GUARDED_BY(mutex_);  // the holder of the oldest lease first
};

}  // namespace nvx
