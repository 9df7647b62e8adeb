#include "torch/streams/pending_sends.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/error.h"

namespace nvx {

std::shared_ptr<PendingSends> PendingSends::of(std::shared_ptr<Group> group) {
  const std::shared_ptr<PendingSends> sends(new PendingSends(std::move(group)));
  sends->poller_ = Poller::of(std::weak_ptr(sends), &PendingSends::poll, Poller::kSoon);
  return sends;
}

bool PendingSends::add(Entry&& entry) {
  entry.deadline = Deadline::after(group_->span_of(entry.message->timeout));
  MutexLock lock(mutex_);
  waiting_.push_back(std::move(entry));
  count_.store(waiting_.size(), std::memory_order_release);
  return poller_->wake();
}

Poller::Seen PendingSends::poll() {
  const bool moved = post();
  const bool more = count_.load(std::memory_order_acquire) != 0;
  if (!moved) return {more, {}};
  return {more, [group = group_] { group->mailbox().push(Runner::kPool); }};
}

bool PendingSends::waits(const std::function<bool(const Entry&)>& is) {
  if (count_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(), is);
}

/// Checks all messages once; returns true if some went to the mailbox. If the group has ended, sends go as well, and
/// the mailbox refuses them; a receive is dropped, since earlier work of its stream may still use the tensor. The
/// mailbox receives them in order, under the lock. It is pushed after the lock is released, because the completion
/// callbacks that it runs may wait for another message.
bool PendingSends::post() {
  std::list<Entry> gone;  // destroyed without the lock
  MutexLock lock(mutex_);
  std::set<std::pair<int, int64_t>> held;
  for (auto next = waiting_.begin(); next != waiting_.end();) {
    const auto entry = next++;
    const bool receives = entry->owner.defined();
    if (receives) {  // its peer may change meanwhile
      const std::optional<bool> reached = poll_entry(*entry);
      if (!reached) continue;
      if (*reached) entry->message->reached.store(true, std::memory_order_release);
    } else {
      const std::pair to{entry->message->peer, entry->message->tag};
      if (held.contains(to) || !poll_entry(*entry)) {
        held.insert(to);
        continue;
      }
      group_->mailbox().post(entry->message);
    }
    gone.splice(gone.end(), waiting_, entry);
  }
  count_.store(waiting_.size(), std::memory_order_release);
  lock.unlock();
  return !gone.empty();
}

/// Whether the device has reached the message, or false if that does not matter any more. Empty: it has to wait.
std::optional<bool> PendingSends::poll_entry(const Entry& entry) {
  try {
    if (group_->closed() || (entry.owner && entry.message->done())) return false;
    if (!entry.staging) return true;
    const std::optional<Status> end = entry.staging->poll(*group_, entry.deadline);
    return end ? std::optional(end->ok()) : std::nullopt;
  } catch (const std::exception& error) {
    (void)group_->fail(system_failure("a message could not be copied from its device", error));
    return false;
  }
}

void PendingSends::flush(const Message* message, const Deadline& deadline) {
  const auto is_it = [message](const Entry& entry) { return !message || entry.message.get() == message; };
  const auto gone = [&] {
    if (waits(is_it) && post()) group_->mailbox().push(Runner::kPool);
    return !waits(is_it);
  };
  (void)wait_on_device(*group_, gone, deadline);
}

}  // namespace nvx
