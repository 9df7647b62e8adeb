#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "net/messenger.h"

namespace nvx::net {

class GroupPort;

/// The messages of a group's mailbox between hosts: control messages, which carry small messages, and large messages in
/// segments. The first segments of a large one are sent ahead of its grant, as many as the receiver keeps. The caller
/// holds the messenger's lock.
class PointToPoint final : private Sender {
 public:
  /// An announcement, or a report of how many have been read.
  struct Control {
    Kind kind;
    int from;
    uint64_t value;
    Envelope envelope;
    std::vector<std::byte> body;
  };
  /// The caller's object for a message whose memory the link reads or writes: next_done() returns it.
  using Owner = std::shared_ptr<void>;

  PointToPoint(GroupPort& port, int ranks);
  PointToPoint(const PointToPoint&) = delete;

  /// `notify`: called when a control message or completed message may be there, or the group fails. The lock may be
  /// held.
  void on_change(std::function<void()> notify) { notify_ = std::move(notify); }
  void notify() const { notify_(); }

  std::optional<Control> next_control();
  /// The longest message that goes with its announcement, so that its send ends before its receiver has called. It is
  /// below segment_bytes() of every link, and 64 unread announcements of a rank have at most 2 MiB.
  static constexpr size_t kMostEager = 32 << 10;
  /// Announces a message, and sends it with the announcement if that carries data. `owner`: next_done() returns it when
  /// the link has read the body; without an owner the body is copied, and has at most Messenger::kMostCopied bytes.
  void announce(int rank, const Envelope& envelope, std::span<const std::byte> body, Owner owner = nullptr);
  /// Grants a large message, which is then written to this memory.
  void grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner = nullptr);
  /// Sends a large message that has been announced: as much as its receiver keeps ahead of its grant, but nothing if
  /// the receiver is full. It ends after its grant.
  void send(int rank, uint64_t number, const std::byte* data, size_t bytes, bool is_full, Owner owner = nullptr);
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
  using Key = uint64_t;  // the rank, and the number of the message modulo 2^32
  struct Transfer {
    int rank;
    std::byte* data;  // null if all of it goes with its announcement
    size_t bytes;
    Owner owner;
    size_t moved = 0;
    int busy = 0;              // segments that the link still reads or writes
    size_t may_move = 0;       // of an outgoing one: the bytes that may have been sent by now
    uint64_t ahead = 0;        // the cost of those until its grant
    bool granted = false;      // of an outgoing one
    bool failed = false;       // the rest is not sent
    std::vector<bool> seen{};  // segments that have arrived or are being fetched
  };
  struct Early {
    uint32_t segment;
    std::vector<std::byte> body;
  };
  struct Rank {
    uint64_t unread = 0;  // cost of its control messages
    uint64_t ahead = 0;   // cost of the segments that were sent to it ahead of their grant
    uint64_t kept = 0;    // cost of its segments that have no grant yet
  };

  void sent(uint64_t cookie, const Status& status) override;
  void push(Key key, Transfer& transfer);
  void take_grant(Key key);
  void end_if_over(Key key, Transfer& transfer);
  void keep(const MessageHeader& header, std::span<const std::byte> body);
  bool store(Key key, Transfer& transfer, uint32_t segment, std::span<const std::byte> body);
  bool fits(const Transfer& transfer, uint32_t segment, size_t bytes) const;
  int busy() const;
  void disconnect_busy();

  GroupPort& port_;
  std::function<void()> notify_ = [] {};
  std::deque<Control> controls_;
  std::vector<Rank> ranks_;
  const uint64_t most_ahead_;  // to each rank; the same on all ranks
  std::map<Key, Transfer> outgoing_, incoming_;
  std::vector<Key> to_push_;  // outgoing transfers of which the link has read a segment, and that have more
  std::map<Key, std::vector<Early>> early_;
  bool dropped_ = false;
  std::deque<Owner> done_;
};

}  // namespace nvx::net
