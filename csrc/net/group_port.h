#pragma once

#include <compare>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/failure_note.h"
#include "net/messenger.h"
#include "net/rendezvous.h"

namespace nvx::net {

class ScheduleRun;

/// A group's end of the messenger, for one of its ranks: its peers, its open runs, early segments, and mail. The
/// messenger's lock guards all of it, and the caller must hold that lock; failed() may be called without it.
class GroupPort {
 public:
  /// The end of a rank.
  struct Fate {
    enum class What {
      kLost,        ///< its process cannot be reached any more
      kLeft,        ///< it has destroyed the group
      kGaveThisUp,  ///< it considers this process lost, so this process considers it lost too
    };
    int rank = kNobody;
    What what = What::kLost;
    std::string why{};  ///< for kLost and kGaveThisUp
    bool left() const { return what == What::kLeft; }
  };
  /// A failure that another rank reported.
  struct Told {
    int by = kNobody;
    Failure failure;
  };
  /// A message for the mailbox: an announcement, or an answer to one.
  struct MailMessage {
    Kind kind;
    int from;
    uint64_t value;
    MailHead head;
    std::vector<std::byte> body;
  };

  GroupPort(std::shared_ptr<Messenger> messenger, uint64_t group, int rank, int size);
  ~GroupPort();
  GroupPort(const GroupPort&) = delete;
  GroupPort& operator=(const GroupPort&) = delete;

  Messenger& messenger() { return *messenger_; }
  /// The messenger's lock, which guards all of this.
  Mutex& mutex() RETURN_CAPABILITY(messenger_->mutex()) { return messenger_->mutex(); }
  int rank() const { return rank_; }

  void connect(int rank, std::span<const std::byte> address) REQUIRES(messenger_->mutex());
  /// Records this rank's number in the whole job; see Messenger::meet().
  void meet(int rank, uint64_t global_rank, std::weak_ptr<void> standing, std::string known_as)
      REQUIRES(messenger_->mutex()) {
    messenger_->meet(global_rank, ranks_[size_t(rank)].peer, std::move(standing), std::move(known_as));
  }
  /// Stops sending and receiving. Peers that ask for the group are told that it is gone.
  void leave() REQUIRES(messenger_->mutex());

  // --- runs
  void open(ScheduleRun& run) REQUIRES(messenger_->mutex());
  void close(ScheduleRun& run) REQUIRES(messenger_->mutex());
  /// Passes the segments to a run that arrived before their step had begun.
  void offer_early(ScheduleRun& run, int from, uint16_t message) REQUIRES(messenger_->mutex());
  /// Records the operation that begins and its label. The last few are kept for peers that ask.
  void begin_operation(uint32_t op, const Label& label) REQUIRES(messenger_->mutex());
  /// Sends this rank's label of an operation to a rank that is waited for. If that rank calls something else, both
  /// ranks learn of it.
  enum class Asks { kYes, kNo };
  void show_label(int rank, uint32_t op, Asks asks = Asks::kYes) REQUIRES(messenger_->mutex());
  bool has_called(int rank, uint32_t op) const REQUIRES(messenger_->mutex()) {
    return int32_t(ranks_[size_t(rank)].called - op) >= 0;
  }
  /// A rank whose label of this operation differs from this rank's, and its label.
  std::optional<std::pair<int, Label>> clash(uint32_t op) const REQUIRES(messenger_->mutex());
  /// This rank's label of an operation, if it is one of the last ones.
  std::optional<Label> called_here(uint32_t op) const REQUIRES(messenger_->mutex());
  /// Ends all operations before `op`. Messages for them that still arrive are late or a mismatch.
  void end_operation(uint32_t op) REQUIRES(messenger_->mutex());
  /// A label that arrived for an operation which has ended here. It may differ from this rank's label.
  struct LateLabel {
    int rank;  ///< that sent it
    uint32_t op;
    Label label;
  };
  std::optional<LateLabel> late_label() REQUIRES(messenger_->mutex());
  /// Whether a segment of this size may be sent to a rank now; if so, it counts as sent. Unacknowledged cost is bounded
  /// by kCredit; each segment costs kSegmentCost beside its bytes. While less than kCreditStep is unacknowledged, one
  /// segment of any length may go.
  bool take_credit(int rank, size_t bytes) REQUIRES(messenger_->mutex());
  void acknowledge(int rank, size_t bytes) REQUIRES(messenger_->mutex());
  void send(int rank, MessageHeader header, std::span<const std::byte> behind, std::span<const std::byte> body,
            Sender* sender, uint64_t cookie) REQUIRES(messenger_->mutex());
  /// Sends a ping to the rank.
  void ask(int rank) REQUIRES(messenger_->mutex());
  /// Closes the connection to a rank, so that the link releases buffers of a failed operation.
  void disconnect(int rank) REQUIRES(messenger_->mutex());

  // --- failure
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const std::optional<Told>& told() const REQUIRES(messenger_->mutex()) { return told_; }
  /// `hear` is called once, when another rank fails the group, with the messenger's lock held, on the thread that
  /// drives the messenger.
  void on_failure(std::function<void(const Told&)> hear) REQUIRES(messenger_->mutex());
  /// How a rank has ended: lost or left; nothing while it is alive.
  std::optional<Fate> fate(int rank) REQUIRES(messenger_->mutex());
  /// How long a rank that is waited for has not answered pings; 0 if it was not asked.
  Clock::duration silence(int rank) const REQUIRES(messenger_->mutex());
  /// As Messenger::unheard(), for a rank.
  std::string unheard(int rank) REQUIRES(messenger_->mutex());
  /// Reports the group's failure on this rank to these ranks.
  void poison(const Failure& why, const std::vector<int>& ranks) REQUIRES(messenger_->mutex());
  /// Reports the failure of another group of this process to all ranks that wait for this one, now or later. Only the
  /// first call counts.
  void tell_trouble(const Failure& what) REQUIRES(messenger_->mutex());
  /// The text of such a report from a rank, or an empty text.
  const std::string& trouble(int rank) const REQUIRES(messenger_->mutex()) { return ranks_[size_t(rank)].trouble; }
  /// The peer number of a rank, or nothing if there is no such rank or its address is unknown.
  std::optional<PeerId> process_of(int rank) const REQUIRES(messenger_->mutex()) {
    const size_t r = size_t(rank);
    return r < ranks_.size() && ranks_[r].known ? std::optional(ranks_[r].peer) : std::nullopt;
  }
  /// The ranks with which any message, including a ping, was exchanged.
  std::vector<int> contacts() const REQUIRES(messenger_->mutex());

  // --- monitored barrier
  void monitor_in(int rank, uint64_t turn) REQUIRES(messenger_->mutex());
  void monitor_out(int rank, uint64_t turn) REQUIRES(messenger_->mutex());
  /// The last barrier that a rank has entered (rank 0: begun), and the last one that rank 0 has released.
  uint64_t monitored_in(int rank) const REQUIRES(messenger_->mutex()) { return ranks_[size_t(rank)].monitored; }
  uint64_t monitored_out() const REQUIRES(messenger_->mutex()) { return monitored_out_; }

  // --- mail
  /// `notify` is called when there may be mail or a completed transfer, and when the group fails.
  void on_mail(std::function<void()> notify) REQUIRES(messenger_->mutex()) { notify_ = std::move(notify); }
  /// The next mail message, in the order of arrival.
  std::optional<MailMessage> next_mail() REQUIRES(messenger_->mutex());
  /// These send one message each. grant() also registers the memory to which the message is written.
  void announce(int rank, const MailHead& head, std::span<const std::byte> body) REQUIRES(messenger_->mutex());
  void tell_taken(int rank, const Taken& taken) REQUIRES(messenger_->mutex());
  void grant(int rank, uint64_t number, std::byte* data, size_t bytes) REQUIRES(messenger_->mutex());
  /// The large messages in both directions that have been granted.
  Rendezvous& rendezvous() { return rendezvous_; }
  /// Releases the memory of all messages, in bounded time.
  void drop_mail() REQUIRES(messenger_->mutex());

  // --- Called by the messenger. place() and dropped() are those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes) REQUIRES(messenger_->mutex());
  void arrived(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  void dropped(const MessageHeader& header, const std::byte* where) REQUIRES(messenger_->mutex());
  /// A ping from the rank has arrived, from that process.
  void pinged_by(uint32_t rank, PeerId peer) REQUIRES(messenger_->mutex());
  /// The rank's process has answered that this group is gone there.
  void note_left(uint32_t rank) REQUIRES(messenger_->mutex());

 private:
  struct Rank {
    PeerId peer = 0;
    bool known = false;  // its address is known
    bool contacted = false;
    bool left = false;
    bool told_trouble = false;
    std::string trouble{};
    uint64_t monitored = 0;
    uint64_t unacknowledged = 0;  // cost that was sent to it and not acknowledged
    uint32_t called = 0;          // the last operation that it is known to have called
    uint64_t kept = 0;            // cost of its early segments
    uint64_t mail_cost = 0;       // cost of its unread mail
    uint64_t to_acknowledge = 0;  // cost that was received from it and is not acknowledged yet
  };
  /// A segment that arrived before its step began, indexed by its message. With many receivers or slow ranks, thousands
  /// of segments can wait here.
  struct Early {
    struct Message {
      uint32_t op;
      uint16_t run;
      uint32_t from;
      uint16_t number;
      auto operator<=>(const Message&) const = default;
    };
    MessageHeader header;
    std::optional<First> first;
    std::vector<std::byte> body;
  };

  void take_segment(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  bool keep(int rank, size_t bytes) REQUIRES(messenger_->mutex());
  void forget_early(const Early& early) REQUIRES(messenger_->mutex());
  void drop_early(uint32_t first_op, uint32_t last_op) REQUIRES(messenger_->mutex());
  void note_called(const MessageHeader& header) REQUIRES(messenger_->mutex());
  void take_label(const MessageHeader& header, std::span<const std::byte> whole) REQUIRES(messenger_->mutex());
  void fail(Told told) REQUIRES(messenger_->mutex());
  void pass_trouble(int rank) REQUIRES(messenger_->mutex());

  std::shared_ptr<Messenger> messenger_;
  const uint64_t group_;
  const int rank_;
  std::vector<Rank> ranks_;
  std::vector<ScheduleRun*> runs_;
  std::map<Early::Message, std::vector<Early>> early_;
  uint32_t ended_ = 0;  // operations before this one have ended here
  std::optional<LateLabel> late_label_;
  struct Called {
    uint32_t op = 0;
    Label label{};
  };
  std::array<Called, 16> called_{};  // by op
  std::optional<std::pair<int, Called>> clash_;
  bool left_ = false;
  std::atomic<bool> failed_{false};
  std::optional<Told> told_;
  std::function<void(const Told&)> hear_;
  std::optional<FailureNote> trouble_;  // of other groups of this process

  uint64_t monitored_out_ = 0;
  std::function<void()> notify_ = [] {};  // may be called with the messenger's lock held
  std::deque<MailMessage> mail_;
  Rendezvous rendezvous_{*this, /*notify=*/[this] { notify_(); }};
};

}  // namespace nvx::net
