#pragma once

#include <atomic>
#include <list>
#include <memory>

#include "base/deadline.h"
#include "base/mutex.h"
#include "group/group.h"
#include "group/mailbox.h"
#include "torch/transit.h"

namespace nvx {

/// Messages whose data has yet to come from a device. Each is handed to the mail when it has, and nobody else waits for
/// that: not who sends it, and no other message but those to the same peer with the same tag, whose order stays.
class Departures : public std::enable_shared_from_this<Departures> {
 public:
  explicit Departures(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  /// Takes a message on its way; transit: its data's, null where that is there. Both are kept by the message.
  /// False where nobody could look after it: then the caller is to see it off.
  bool add(const std::shared_ptr<Message>& message, Transit* transit) EXCLUDES(mutex_);
  /// Whether one waits that was sent to the same peer with the same tag.
  bool any_before(const Message& message) EXCLUDES(mutex_);
  /// Returns when the message, or with null every one, has been handed over, or when give_up() says so, which is asked
  /// now and then.
  void see_off(const Message* message, const std::function<bool()>& give_up) EXCLUDES(mutex_);

 private:
  struct Entry {
    std::shared_ptr<Message> message;
    Transit* transit;
    Deadline deadline;
  };
  bool post() EXCLUDES(mutex_);
  bool find_attendant();
  bool may_go(const Entry& entry) REQUIRES(mutex_);
  bool waits(const Message* message) EXCLUDES(mutex_);
  void attend() EXCLUDES(mutex_);

  const std::shared_ptr<Group> group_;
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::list<Entry> waiting_ GUARDED_BY(mutex_);  // in the order in which they were sent
  bool attended_ GUARDED_BY(mutex_) = false;     // a job of the pool looks after them
};

}  // namespace nvx
