#pragma once

#include <functional>
#include <vector>

#include "base/mutex.h"

namespace nvx {

class Group;

/// The groups of this process that stand, so that each hears of what befalls the others.
class Roster {
 public:
  static Roster& here();
  void join(Group& group) EXCLUDES(mutex_);
  /// The group is not used any more when this returns.
  void leave(Group& group) EXCLUDES(mutex_);
  /// Calls this for every other group. What it does in turn is not told again.
  void tell_others(const Group& of, const std::function<void(Group&)>& tell) EXCLUDES(mutex_);
  /// Whether this thread is inside of that.
  static bool is_telling();

 private:
  Mutex mutex_;
  std::vector<Group*> groups_ GUARDED_BY(mutex_);
};

}  // namespace nvx
