#pragma once

#include <atomic>
#include <set>

#include "base/mutex.h"

namespace nvx {

class ProcessGroupNVX;

/// The groups of this process, for use at its end.
class Registry {
 public:
  /// A forked child gets a new registry: the parent's groups are not the child's, and another thread may have held the
  /// lock.
  static Registry& here();
  void add(ProcessGroupNVX& group) EXCLUDES(mutex_);
  void remove(ProcessGroupNVX& group) EXCLUDES(mutex_);
  void see_off_proxies() EXCLUDES(mutex_);
  void abort_all() EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<ProcessGroupNVX*> groups_ GUARDED_BY(mutex_);
};

/// At the interpreter's exit: ends the pool's threads, aborts the operations that block them, and completes sends.
void stop_everything();
inline std::atomic<bool> exiting{false};  ///< the exit has begun

}  // namespace nvx
