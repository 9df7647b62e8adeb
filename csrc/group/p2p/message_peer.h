#pragma once

#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "group/core/core.h"
#include "kernel/cpu/pad.h"
#include "kernel/reduce/cache_policy.h"
#include "memory/shm/leases.h"
#include "net/group_port.h"

namespace nvx {

class Mailbox;
struct Message;

/// An unexpected message: it arrived before its receive.
struct Unexpected {
  int peer;
  uint64_t number;
  int64_t tag;
  DType dtype;
  size_t bytes;
  bool carried;
  std::vector<std::byte> data;
  bool on_device = false;
  uint64_t place = 0;  // see Envelope
  /// The bytes of memory that it takes, about.
  size_t memory() const { return sizeof(*this) + data.size(); }
};

/// Wakes the threads of a rank of this host that sleep in its mailbox.
void wake(const Members& members, int rank);

/// The two directions of the messages between this rank and another one. The lock of the mailbox guards it.
class MessagePeer {
 public:
  MessagePeer(Mailbox& box, Core& core, int rank) : box_(box), core_(core), rank_(rank) {}
  virtual ~MessagePeer() = default;
  MessagePeer(const MessagePeer&) = delete;

  void send(const std::shared_ptr<Message>& message) { unannounced_.push_back(message); }
  /// The message that the peer has announced with this number has a receive.
  void receive(const std::shared_ptr<Message>& message, uint64_t number) { to_grant_.emplace_back(message, number); }
  /// Progresses without waiting. True if anything moved.
  virtual bool move() = 0;
  /// The staging of a peer to which nothing is in flight.
  virtual Span release_idle() { return {}; }
  /// Drops all messages. No copy writes to a tensor any more, unless one goes on after `until`.
  virtual void clear(Clock::time_point until);
  /// Whether a granted message is there that this rank has not read to its end.
  virtual bool arriving() const { return false; }
  /// Whether the peer may be reading a tensor of this rank.
  virtual bool lends() const { return false; }
  /// Counts the memory of unexpected messages. A peer that receives the report that this rank is full keeps the data of
  /// further messages until there is a receive.
  void keep(const Unexpected& unexpected);
  void release_kept(const Unexpected& unexpected);

  uint32_t undelivered = 0;  ///< standing receives that are done and whose `finished()` has not returned

 protected:
  /// Whether a message travels in its announcement. An empty one has no data that could follow later.
  static bool carries(size_t bytes, size_t most, bool full) { return bytes == 0 || (bytes <= most && !full); }
  virtual void send_full(bool full) = 0;
  void finish(const std::shared_ptr<Message>& message, Status status);
  void arrive(Unexpected&& unexpected);

  Mailbox& box_;
  Core& core_;
  const int rank_;
  std::deque<std::shared_ptr<Message>> unannounced_;
  uint64_t announced_ = 0;
  std::deque<std::pair<std::shared_ptr<Message>, uint64_t>> to_grant_;
  uint64_t taken_ = 0;

 private:
  uint64_t kept_ = 0;  // bytes of unexpected messages
  bool full_ = false;
};

/// A rank of this host: messages go through the pads, and large ones are streamed through leased staging. Copy engines
/// only write to this rank's memory: to slots that the peer reads, and to tensors of receives.
class IntraHostPeer final : public MessagePeer {
 public:
  IntraHostPeer(Mailbox& box, Core& core, int rank);
  ~IntraHostPeer() override;
  bool move() override;
  void clear(Clock::time_point until) override;
  bool arriving() const override;
  bool lends() const override;
  Span release_idle() override;

 private:
  void release_slots();
  bool announce();
  bool take();
  bool grant();
  bool read_grants();
  bool stream();
  bool consume();
  size_t write_chunk(Message& message);
  size_t copy_to_slots(const std::shared_ptr<Message>& message, Status* status);
  bool stage(const std::shared_ptr<Message>& message, Status* status);
  size_t read_chunk(Message& message, Status* status);
  size_t fetch(const std::shared_ptr<Message>& message, kernel::ChunkPlace place, uint64_t chunks, Status* status);
  bool lease(Message& message);
  bool lease_slots(size_t bytes, bool is_read);
  bool lease_on_host(size_t bytes, bool is_read);
  void show_lease(kernel::ChunkPlace place, const Span& span);
  bool is_read() const;
  std::shared_ptr<DeviceCopy> begin(std::vector<DeviceCopy::Piece> pieces, const Message& message);
  void send_full(bool full) override;
  void wake() const { nvx::wake(core_.members, rank_); }

  // This rank writes the first two, the peer the others.
  kernel::Outbox& out_;
  kernel::Inbox& in_;
  const kernel::Outbox& their_out_;
  const kernel::Inbox& their_in_;
  std::unordered_map<uint64_t, std::shared_ptr<Message>> ungranted_;  // by number
  uint64_t grants_seen_ = 0;
  std::deque<std::shared_ptr<Message>> streaming_;
  uint64_t streamed_ = 0;
  Span lease_;
  size_t lease_wanted_ = 0;
  Span part_;            // of the lease, that the receiver reads
  size_t lease_at_ = 0;  // where the next part begins
  Span slots_;           // in the arena of the GPU
  size_t slots_wanted_ = 0;
  std::shared_ptr<DeviceCopy> sending_;                   // of the first message of `streaming_`
  std::shared_ptr<DeviceCopy> fetching_;                  // of the first message of `arriving_`
  std::unique_ptr<kernel::CachePolicyRecords> policies_;  // null before the first stream
  uint64_t granted_ = 0;
  std::deque<std::shared_ptr<Message>> arriving_;  // granted, in that order
  uint64_t consumed_ = 0;
};

/// A rank of another host: the port carries the same protocol, and transfers need no staging.
class InterHostPeer final : public MessagePeer {
 public:
  using MessagePeer::MessagePeer;
  bool move() override;
  void read(net::PointToPoint::Control&& control);

 private:
  bool announce();
  bool grant();
  void take(net::PointToPoint::Control&& control);
  void send_taken();
  void send_full(bool full) override;

  net::Taken peer_taken_;                 // announcements that the peer has reported as read
  net::Taken own_taken_;                  // announcements that this rank has reported as read
  std::map<uint64_t, Unexpected> ahead_;  // announcements that arrived before earlier ones, by number
};

}  // namespace nvx
