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

/// The large messages of a port that have been granted, and are cut into segments: those that are under way, and those
/// whose end nobody has asked for yet. All of it is guarded by the messenger's lock, which the caller holds.
class Rendezvous final : private Sender {
 public:
  /// A message between this rank and another one: that rank, and the message's number.
  using Message = std::pair<int, uint64_t>;

  /// poke: called when there may be something to ask for, with the messenger's lock held.
  Rendezvous(GroupPort& port, std::function<void()> poke);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// A message that this rank has granted will be written to this memory.
  void expect(int rank, uint64_t number, std::byte* data, size_t bytes);
  /// Sends a message that its receiver has granted.
  void send(int rank, uint64_t number, const std::byte* data, size_t bytes);
  /// A message whose body the link has read, so that it may be changed.
  std::optional<Message> next_sent();
  /// A message that has come, whole.
  std::optional<Message> next_received();
  /// Lets go of all memory of messages, in bounded time. Nothing more of them is sent or taken in.
  void drop();

  // --- for the port: what comes. place() and dropped() are as those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes);
  void take(const MessageHeader& header, std::span<const std::byte> body);
  /// False if nothing of a transfer was to be written there.
  bool dropped(const std::byte* where);

 private:
  /// A message under way.
  struct Transfer {
    uint64_t id;
    int rank;
    uint64_t number;
    std::byte* data;
    size_t bytes;
    size_t moved = 0;
    int busy = 0;  // segments that the link still reads, or writes
    bool failed = false;
    std::vector<bool> seen{};  // segments that have come, or are being fetched
  };

  void sent(uint64_t cookie, const Status& status) override;
  void push();
  Transfer* transfer_of(const MessageHeader& header, size_t bytes);
  int busy() const;
  void sever_busy();

  GroupPort& port_;
  const std::function<void()> poke_;
  std::list<Transfer> outgoing_;
  std::list<Transfer> incoming_;
  uint64_t next_id_ = 0;
  std::deque<Message> sent_, received_;
};

}  // namespace nvx::net
