#include "torch/device/pending_sends.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "base/reason.h"

namespace nvx {

bool PendingSends::add(const std::shared_ptr<Message>& message, StagingCopies* staging) {
  MutexLock lock(mutex_);
  waiting_.push_back({message, staging, Deadline::after(group_->span_of(message->timeout))});
  count_.store(waiting_.size(), std::memory_order_release);
  if (!attended_) attended_ = find_attendant();
  return attended_;
}

bool PendingSends::find_attendant() {
  return Engine::here().start([self = shared_from_this()] { self->attend(); });
}

bool PendingSends::any_before(const Message& message) {
  if (count_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const Entry& entry) {
    return entry.message->peer == message.peer && entry.message->tag == message.tag;
  });
}

bool PendingSends::waits(const Message* message) {
  if (count_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [&](const Entry& entry) { return !message || entry.message.get() == message; });
}

/// One look at all messages: true if some went. In a group that has ended they go, too, and are refused there. The mail
/// gets them in their order, under the lock. It is pushed when the lock has been let go, as whoever it tells of an end
/// may wait for another message.
bool PendingSends::post() {
  MutexLock lock(mutex_);
  const size_t before = waiting_.size();
  std::set<std::pair<int, int64_t>> held;
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    const std::pair to{entry->message->peer, entry->message->tag};
    if (held.contains(to) || !may_go(*entry)) {
      held.insert(to);
      ++entry;
      continue;
    }
    group_->mail().post(entry->message);
    entry = waiting_.erase(entry);
  }
  count_.store(waiting_.size(), std::memory_order_release);
  return waiting_.size() != before;
}

bool PendingSends::may_go(const Entry& entry) {
  try {
    return group_->closed() || !entry.staging || entry.staging->look(*group_, entry.deadline).has_value();
  } catch (const std::exception& error) {
    (void)group_->fail(system_failure("a message could not be copied from its device", error));
    return true;
  }
}

void PendingSends::see_off(const Message* message, const std::function<bool()>& give_up) {
  for (int looks = 0; waits(message); ++looks) {
    if (post()) {
      group_->mail().push(Carrier::kPool);
      continue;
    }
    pause_after(looks);
    if (looks % 256 == 255 && give_up()) return;
  }
}

/// A thread that pushes the mail may be held up there by a callback. So before it does, it finds another thread for
/// what is left here.
void PendingSends::attend() {
  constexpr int kOften = 64;
  constexpr std::chrono::microseconds kSoon{20}, kLater{100};
  for (int looks = 0;; ++looks) {
    const bool moved = post();
    MutexLock lock(mutex_);
    const bool relieved = waiting_.empty() || (moved && find_attendant());
    if (waiting_.empty()) attended_ = false;
    lock.unlock();
    if (moved) group_->mail().push(Carrier::kPool), looks = 0;
    if (relieved) return;
    std::this_thread::sleep_for(looks < kOften ? kSoon : kLater);
  }
}

}  // namespace nvx
