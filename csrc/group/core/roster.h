#pragma once

#include <functional>
#include <vector>

#include "base/mutex.h"

namespace nvx {

class FailureState;

/// The live groups of this process, so that each learns of the failures of the others. A process that one group has
/// lost is lost to all. A group that waits for a rank which has failed elsewhere can name the cause.
class Roster {
 public:
  static Roster& here();
  void join(FailureState& group) EXCLUDES(mutex_);
  /// When this returns, no other thread uses the group through the roster.
  void leave(FailureState& group) EXCLUDES(mutex_);
  /// Calls `tell()` for every other group. Does nothing on a thread that is inside a `tell()`.
  void tell_others(const FailureState& of, const std::function<void(FailureState&)>& tell) EXCLUDES(mutex_);
  /// Whether this thread is inside a `tell()`.
  static bool is_telling();

 private:
  Mutex mutex_;
  std::vector<FailureState*> groups_ GUARDED_BY(mutex_);
};

}  // namespace nvx
