#pragma once

#include <functional>
#include <set>

#include "base/mutex.h"

namespace nvx {

class Communicator;

/// The communicators of this process, for use at its end.
class Registry {
 public:
  /// A forked child gets a new registry: the parent's groups are not the child's, and another thread may have held the
  /// lock.
  static Registry& here();
  void add(Communicator& one) EXCLUDES(mutex_);
  void remove(Communicator& one) EXCLUDES(mutex_);
  void each(const std::function<void(Communicator&)>& body) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::set<Communicator*> all_ GUARDED_BY(mutex_);
};

/// At the interpreter's exit: ends the pool's threads, aborts the operations that block them, and completes sends.
void stop_everything();

}  // namespace nvx
