#include "group/core/poller.h"

#include <thread>

#include "group/core/thread_pool.h"

namespace nvx {

bool Poller::wake() {
  MutexLock lock(mutex_);
  woken_ = true;
  if (!polling_) polling_ = find_thread();
  return polling_;
}

bool Poller::find_thread() {
  return ThreadPool::instance().start([self = shared_from_this()] { self->poll(); });
}

/// `act()` may block, for example in the user's code, so this thread first finds another one for the rest.
void Poller::poll() {
  constexpr int kOften = 64;
  for (int polls = 0;; ++polls) {
    {
      MutexLock lock(mutex_);
      woken_ = false;
    }
    Seen seen = progress_();
    MutexLock lock(mutex_);
    const bool more = seen.more || woken_;
    const bool is_over = !more || (seen.act && find_thread());
    if (!more) polling_ = false;
    lock.unlock();
    if (seen.act) seen.act(), polls = 0;
    if (is_over) return;
    std::this_thread::sleep_for(polls < kOften ? pace_.first : pace_.later);
  }
}

}  // namespace nvx
