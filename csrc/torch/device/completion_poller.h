#pragma once

#include <deque>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "torch/work.h"

namespace nvx {

/// Works that have ended, while their results are still on their way. When these have arrived, hooks are told. What a
/// stream brings arrives in order, so one job of the pool looks after all works, each time at the first one of each
/// stream, and at all whose results several streams bring.
class CompletionPoller {
 public:
  static CompletionPoller& here();

  /// False if no thread could be had that looks after it: then the caller tells the hooks at once.
  bool add(c10::intrusive_ptr<NvxWork> work) EXCLUDES(mutex_);

 private:
  using Works = std::vector<c10::intrusive_ptr<NvxWork>>;
  bool find_attendant();
  void attend() EXCLUDES(mutex_);
  Works take_what_is_there() REQUIRES(mutex_);

  Mutex mutex_;
  std::unordered_map<c10::Stream, std::deque<c10::intrusive_ptr<NvxWork>>> waiting_ GUARDED_BY(mutex_);
  Works of_several_streams_ GUARDED_BY(mutex_);
  bool attended_ GUARDED_BY(mutex_) = false;  // a job of the pool looks after them
};

}  // namespace nvx
