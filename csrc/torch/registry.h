#pragma once

#include <atomic>
#include <set>

#include "base/mutex.h"

namespace nvx {

class ProcessGroupNVX;

/// The groups of this process, for its end.
class Registry {
 public:
  /// A forked child begins with one of its own: the parent's groups are not its own, and its lock was perhaps held.
  static Registry& here();
  void add(ProcessGroupNVX& group) EXCLUDES(mutex_);
  void remove(ProcessGroupNVX& group) EXCLUDES(mutex_);
  void see_off_proxies() EXCLUDES(mutex_);
  void abort_all() EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<ProcessGroupNVX*> groups_ GUARDED_BY(mutex_);
};

/// When the interpreter exits: ends the pool's threads, aborting what blocks them, and sees off what was sent.
void stop_everything();
inline std::atomic<bool> exiting{false};  ///< it has begun

}  // namespace nvx
