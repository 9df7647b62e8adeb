#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "net/messenger.h"

namespace nvx::net {

class GroupPort;

/// The messages of a group's mailbox between hosts: control messages, which carry small messages, and granted large
/// messages, in segments. The caller holds the messenger's lock.
class PointToPoint final : private Sender {
 public:
  /// A control message: an announcement, its receipt or its grant.
  struct Control {
    Kind kind;
    int from;
    uint64_t value;
    Envelope envelope;
    std::vector<std::byte> body;
  };
  /// The caller's object for a message whose memory the link reads or writes: next_done() returns it.
  using Owner = std::shared_ptr<void>;

  PointToPoint(GroupPort& port, int ranks) : port_(port), unread_(size_t(ranks)) {}
  PointToPoint(const PointToPoint&) = delete;

  /// `notify`: called when a control message or completed message may be there, or the group fails. The lock may be
  /// held.
  void on_change(std::function<void()> notify) { notify_ = std::move(notify); }
  void notify() const { notify_(); }

  std::optional<Control> next_control();
  /// The longest message that goes with its announcement. A longer one waits for a grant, two latencies more. It is
  /// below segment_bytes() of every link, and 64 unread announcements of a rank have at most 2 MiB.
  static constexpr size_t kMostEager = 32 << 10;
  /// Announces a message, and sends it with the announcement if that carries data. `owner`: next_done() returns it when
  /// the link has read the body; without an owner the body is copied, and has at most Messenger::kMostCopied bytes.
  void announce(int rank, const Envelope& envelope, std::span<const std::byte> body, Owner owner = nullptr);
  /// Grants a large message, which is then written to this memory.
  void grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner = nullptr);
  /// Sends a large message that its receiver has granted.
  void send(int rank, uint64_t number, const std::byte* data, size_t bytes, Owner owner = nullptr);
  /// The owner of a message that has arrived, or whose body the link has read. Null if there is none.
  Owner next_done();
  /// Drops all messages, and releases their memory in bounded time.
  void drop();

  // --- Called by the port. place() and dropped() are those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes);
  /// A control message has arrived. `whole` is the message, `body` the part behind its headers.
  void take_control(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body);
  void take_segment(const MessageHeader& header, std::span<const std::byte> body);
  /// False if no transfer was to be written there.
  bool dropped(const std::byte* where);

 private:
  struct Transfer {
    uint64_t id;
    int rank;
    uint64_t number;
    std::byte* data;  // null if all of it goes with its announcement
    size_t bytes;
    Owner owner;
    size_t moved = 0;
    int busy = 0;  // segments that the link still reads or writes
    bool failed = false;
    std::vector<bool> seen{};  // segments that have arrived or are being fetched
  };

  void sent(uint64_t cookie, const Status& status) override;
  void push(Transfer& transfer);
  Transfer* transfer_of(const MessageHeader& header, size_t bytes);
  int busy() const;
  void disconnect_busy();

  GroupPort& port_;
  std::function<void()> notify_ = [] {};
  std::deque<Control> controls_;
  std::vector<uint64_t> unread_;  // by rank: cost of its control messages
  std::list<Transfer> outgoing_;
  bool may_push_ = false;  // the link has read a segment of a transfer that has more
  std::list<Transfer> incoming_;
  uint64_t next_id_ = 0;
  std::deque<Owner> done_;
};

}  // namespace nvx::net
