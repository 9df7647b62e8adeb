#include "torch/device/completion_poller.h"

#include <thread>

#include "base/contain.h"

namespace nvx {

CompletionPoller& CompletionPoller::here() {
  static auto* const kHere = new CompletionPoller;  // never destroyed: works may outlive static destructors
  return *kHere;
}

bool CompletionPoller::find_attendant() {
  return Engine::here().start([this] { attend(); });
}

bool CompletionPoller::add(c10::intrusive_ptr<NvxWork> work) {
  MutexLock lock(mutex_);
  if (!attended_) attended_ = find_attendant();
  if (!attended_) return false;
  if (work->streams().size() > 1) return of_several_streams_.push_back(std::move(work)), true;
  const c10::Stream stream = work->streams().front();
  waiting_[stream].push_back(std::move(work));
  return true;
}

CompletionPoller::Works CompletionPoller::take_what_is_there() {
  Works there;
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
  return there;
}

/// A thread that tells may be held up there by a hook. So before it does, it finds another thread for what is left
/// here.
void CompletionPoller::attend() {
  constexpr int kOften = 64;
  constexpr std::chrono::microseconds kSoon{20}, kLater{100};
  for (int looks = 0;; ++looks) {
    MutexLock lock(mutex_);
    Works there = take_what_is_there();
    const bool none_left = waiting_.empty() && of_several_streams_.empty();
    const bool relieved = none_left || (!there.empty() && find_attendant());
    if (none_left) attended_ = false;
    lock.unlock();
    for (const auto& work : there) work->tell_that_it_is_there();
    if (!there.empty()) looks = 0;
    there.clear();
    if (relieved) return;
    std::this_thread::sleep_for(looks < kOften ? kSoon : kLater);
  }
}

}  // namespace nvx
