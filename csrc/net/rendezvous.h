#pragma once

#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "net/messenger.h"

namespace nvx::net {

class GroupPort;

/// The large messages of a group's port that have been granted and are sent in segments: those in flight, and those
/// whose completion has not been fetched. The messenger's lock guards all of it, and the caller holds that lock.
class Rendezvous final : private Sender {
 public:
  /// A message between this rank and another one: the other rank, and the message's number.
  using Message = std::pair<int, uint64_t>;

  /// `notify` is called when next_sent() or next_received() may have a result, with the messenger's lock held.
  Rendezvous(GroupPort& port, std::function<void()> notify);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Registers the memory for a message that this rank has granted.
  void expect(int rank, uint64_t number, std::byte* data, size_t bytes);
  /// Sends a message that its receiver has granted.
  void send(int rank, uint64_t number, const std::byte* data, size_t bytes);
  /// A message whose body the link has read, so its memory may change.
  std::optional<Message> next_sent();
  /// A message that has arrived completely.
  std::optional<Message> next_received();
  /// Releases the memory of all messages, in bounded time. Nothing more of them is sent or received.
  void drop();

  // --- Called by the port. place() and dropped() are those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes);
  void take(const MessageHeader& header, std::span<const std::byte> body);
  /// False if no transfer was to be written there.
  bool dropped(const std::byte* where);

 private:
  /// A message in flight.
  struct Transfer {
    uint64_t id;
    int rank;
    uint64_t number;
    std::byte* data;
    size_t bytes;
    size_t moved = 0;
    int busy = 0;  // segments that the link still reads or writes
    bool failed = false;
    std::vector<bool> seen{};  // segments that have arrived or are being fetched
  };

  void sent(uint64_t cookie, const Status& status) override;
  void push();
  Transfer* transfer_of(const MessageHeader& header, size_t bytes);
  int busy() const;
  void disconnect_busy();

  GroupPort& port_;
  const std::function<void()> notify_;
  std::list<Transfer> outgoing_;
  std::list<Transfer> incoming_;
  uint64_t next_id_ = 0;
  std::deque<Message> sent_, received_;
};

}  // namespace nvx::net
