#include "torch/call/completion_poller.h"

namespace nvx {

CompletionPoller& CompletionPoller::instance() {
  static auto* const kInstance = new CompletionPoller;  // never destroyed: works may outlive static destructors
  return *kInstance;
}

bool CompletionPoller::add(c10::intrusive_ptr<NvxWork> work) {
  MutexLock lock(mutex_);
  if (!poller_->wake()) return false;
  if (work->streams().size() > 1) return of_several_streams_.push_back(std::move(work)), true;
  const c10::Stream stream = work->streams().front();
  waiting_[stream].push_back(std::move(work));
  return true;
}

Poller::Seen CompletionPoller::progress() {
  Works there;
  MutexLock lock(mutex_);
  for (auto line = waiting_.begin(); line != waiting_.end();) {
    auto& works = line->second;
    while (!works.empty() && works.front()->is_there()) {
      there.push_back(std::move(works.front()));
      works.pop_front();
    }
    line = works.empty() ? waiting_.erase(line) : std::next(line);
  }
  std::erase_if(of_several_streams_, [&](c10::intrusive_ptr<NvxWork>& work) {
    if (!work->is_there()) return false;
    there.push_back(std::move(work));
    return true;
  });
  const bool more = !waiting_.empty() || !of_several_streams_.empty();
  if (there.empty()) return {more, {}};
  return {more, [there = std::move(there)] {
            for (const auto& work : there) work->report_arrival();
          }};
}

}  // namespace nvx
