#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "torch/work.h"

namespace nvx {

/// Works that are over, whose results are on their way, until whoever listens has been told that these are there. What
/// a stream brings comes in order, so one job of the pool looks after all of them, at the first of each stream.
class Endings {
 public:
  static Endings& here();

  /// False where nobody can look after it: then the caller tells at once.
  bool add(c10::intrusive_ptr<NvxWork> work) EXCLUDES(mutex_);

 private:
  using Works = std::vector<c10::intrusive_ptr<NvxWork>>;
  bool find_attendant();
  void attend() EXCLUDES(mutex_);
  Works take_what_is_there() REQUIRES(mutex_);

  Mutex mutex_;
  std::unordered_map<c10::Stream, std::deque<c10::intrusive_ptr<NvxWork>>> waiting_ GUARDED_BY(mutex_);
  bool attended_ GUARDED_BY(mutex_) = false;  // a job of the pool looks after them
};

}  // namespace nvx
