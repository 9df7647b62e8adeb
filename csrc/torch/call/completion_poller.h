#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "group/core/poller.h"
#include "torch/call/work.h"

namespace nvx {

/// Works that have ended before their results have arrived. Calls their hooks when these have. Each poll checks the
/// first work of each stream, and all works whose results come on several streams.
class CompletionPoller {
 public:
  static CompletionPoller& instance();

  /// Returns false if no thread is available to poll; the caller then calls the hooks at once.
  bool add(c10::intrusive_ptr<NvxWork> work) EXCLUDES(mutex_);

 private:
  using Works = std::vector<c10::intrusive_ptr<NvxWork>>;
  Poller::Seen progress() EXCLUDES(mutex_);

  const std::shared_ptr<Poller> poller_ = std::make_shared<Poller>([this] { return progress(); }, Poller::kSoon);
  Mutex mutex_;
  std::unordered_map<c10::Stream, std::deque<c10::intrusive_ptr<NvxWork>>> waiting_ GUARDED_BY(mutex_);
  Works of_several_streams_ GUARDED_BY(mutex_);
};

}  // namespace nvx
