#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "group/core/poller.h"
#include "torch/work.h"

namespace nvx {

/// Works that have ended, while their results are still on their way. When these have arrived, hooks are told.
/// Results arrive in the order of their stream, so a look is at the first work of each stream, and at all whose results
/// several streams bring.
class CompletionPoller {
 public:
  static CompletionPoller& here();

  /// False if no thread could be had that looks after it: then the caller tells the hooks at once.
  bool add(c10::intrusive_ptr<NvxWork> work) EXCLUDES(mutex_);

 private:
  using Works = std::vector<c10::intrusive_ptr<NvxWork>>;
  Poller::Seen look() EXCLUDES(mutex_);
  Works take_what_is_there() REQUIRES(mutex_);

  const std::shared_ptr<Poller> poller_ = std::make_shared<Poller>([this] { return look(); }, Poller::kSoon);
  Mutex mutex_;
  std::unordered_map<c10::Stream, std::deque<c10::intrusive_ptr<NvxWork>>> waiting_ GUARDED_BY(mutex_);
  Works of_several_streams_ GUARDED_BY(mutex_);
};

}  // namespace nvx
