#pragma once

#include <atomic>
#include <list>
#include <memory>

#include "base/deadline.h"
#include "base/mutex.h"
#include "group/core/poller.h"
#include "group/group.h"
#include "group/p2p/mailbox.h"
#include "torch/device/staging_copies.h"

namespace nvx {

/// Messages whose data has yet to come from a device. Each is given to the mail when its data has come. Nobody waits
/// for that but messages to the same peer with the same tag, so that these keep their order: neither the sender nor
/// other messages.
class PendingSends {
 public:
  static std::shared_ptr<PendingSends> of(std::shared_ptr<Group> group);

  /// Takes a message that is to be sent. staging: that of its data, null where the data is there already. The message
  /// keeps both alive. False if no thread could be had that looks after it: then the caller must call see_off().
  bool add(const std::shared_ptr<Message>& message, StagingCopies* staging) EXCLUDES(mutex_);
  /// Whether a message waits that was sent to the same peer with the same tag.
  bool any_before(const Message& message) EXCLUDES(mutex_);
  /// Returns when the message, or for null every message, has been given to the mail, or at the deadline.
  void see_off(const Message* message, const Deadline& deadline) EXCLUDES(mutex_);

 private:
  struct Entry {
    std::shared_ptr<Message> message;
    StagingCopies* staging;
    Deadline deadline;
  };
  explicit PendingSends(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  Poller::Seen look() EXCLUDES(mutex_);
  bool post() EXCLUDES(mutex_);
  bool may_go(const Entry& entry) REQUIRES(mutex_);
  bool waits(const Message* message) EXCLUDES(mutex_);

  const std::shared_ptr<Group> group_;
  std::shared_ptr<Poller> poller_;
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::list<Entry> waiting_ GUARDED_BY(mutex_);  // in the order in which they were sent
};

}  // namespace nvx
