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

/// The messages of a group's mailbox between hosts: announcements, the answers to them, and granted large messages, in
/// segments. The caller holds the messenger's lock.
class Mail final : private Sender {
 public:
  /// An announcement, or an answer to one.
  struct Letter {
    Kind kind;
    int from;
    uint64_t value;
    MailHead head;
    std::vector<std::byte> body;
  };
  /// The caller's object for a large message: next_done() returns it.
  using Owner = std::shared_ptr<void>;

  Mail(GroupPort& port, int ranks) : port_(port), unread_(size_t(ranks)) {}
  Mail(const Mail&) = delete;

  /// `notify`: called when a letter or completed message may be there, or the group fails. The lock may be held.
  void on_news(std::function<void()> notify) { notify_ = std::move(notify); }
  void notify() const { notify_(); }

  std::optional<Letter> next_letter();
  /// Announces a message, and sends it with the announcement if it is small.
  void announce(int rank, const MailHead& head, std::span<const std::byte> body);
  /// Grants a large message, which is then written to this memory.
  void grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner = nullptr);
  /// Sends a large message that its receiver has granted.
  void send(int rank, uint64_t number, const std::byte* data, size_t bytes, Owner owner = nullptr);
  /// The owner of a large message that has arrived, or whose body the link has read. Null if there is none.
  Owner next_done();
  /// Drops all letters and messages, and releases their memory in bounded time.
  void drop();

  // --- Called by the port. place() and dropped() are those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes);
  /// A letter has arrived. `whole` is the message, `body` what follows its headers.
  void take_letter(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body);
  void take_segment(const MessageHeader& header, std::span<const std::byte> body);
  /// False if no transfer was to be written there.
  bool dropped(const std::byte* where);

 private:
  struct Transfer {
    uint64_t id;
    int rank;
    uint64_t number;
    std::byte* data;
    size_t bytes;
    Owner owner;
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
  std::function<void()> notify_ = [] {};
  std::deque<Letter> letters_;
  std::vector<uint64_t> unread_;  // by rank: cost of its letters
  std::list<Transfer> outgoing_;
  std::list<Transfer> incoming_;
  uint64_t next_id_ = 0;
  std::deque<Owner> done_;
};

}  // namespace nvx::net
