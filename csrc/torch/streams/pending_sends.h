#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>

#include "base/deadline.h"
#include "base/mutex.h"
#include "group/core/poller.h"
#include "group/group.h"
#include "group/p2p/mailbox.h"
#include "torch/streams/staging_copies.h"

namespace nvx {

/// Messages whose data is still on its way from a device. Each goes to the mailbox when its data has arrived. This
/// delays only later messages to the same peer with the same tag, which must keep their order. It blocks neither the
/// sender nor other messages. Receives by copy engines, which are in the mailbox already, wait here for their device to
/// reach them.
class PendingSends {
 public:
  static std::shared_ptr<PendingSends> of(std::shared_ptr<Group> group);

  /// Accepts a message to send. staging: of its data, null if the data is in host memory already. The message keeps
  /// both alive. Returns false if no thread is available to poll; the caller must then call flush().
  bool add(const std::shared_ptr<Message>& message, StagingCopies* staging) EXCLUDES(mutex_) {
    return add({message, staging, Deadline(), /*owner=*/{}});
  }
  /// The same for a receive, which may end earlier: `owner` owns the staging.
  bool add_receive(const std::shared_ptr<Message>& message, StagingCopies* staging,
                   c10::intrusive_ptr<c10::intrusive_ptr_target> owner) EXCLUDES(mutex_) {
    return add({message, staging, Deadline(), std::move(owner)});
  }
  /// Whether an earlier message to the same peer with the same tag is waiting.
  bool any_before(const Message& message) EXCLUDES(mutex_) {
    return waits([&](const Entry& other) {
      return !other.owner && other.message->peer == message.peer && other.message->tag == message.tag;
    });
  }
  /// Returns when the message, or for null every message, has gone to the mailbox, or at the deadline.
  void flush(const Message* message, const Deadline& deadline) EXCLUDES(mutex_);

 private:
  struct Entry {
    std::shared_ptr<Message> message;
    StagingCopies* staging;
    Deadline deadline;
    c10::intrusive_ptr<c10::intrusive_ptr_target> owner;  // not null: a receive
  };
  bool add(Entry&& entry) EXCLUDES(mutex_);
  explicit PendingSends(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Poller::Seen poll() EXCLUDES(mutex_);
  bool post() EXCLUDES(mutex_);
  std::optional<bool> poll_entry(const Entry& entry) REQUIRES(mutex_);
  /// Whether a message waits that `is` picks.
  bool waits(const std::function<bool(const Entry&)>& is) EXCLUDES(mutex_);

  const std::shared_ptr<Group> group_;
  std::shared_ptr<Poller> poller_;
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::list<Entry> waiting_ GUARDED_BY(mutex_);  // in the order of the sends
};

}  // namespace nvx
