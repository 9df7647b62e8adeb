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

/// What a group has at the messenger, for one of its ranks: who the other ranks are, which runs are open, what came too
/// early, and mail. All of it is guarded by the messenger's lock, which the caller holds; but failed() may be asked at
/// any time.
class GroupPort {
 public:
  /// What has become of a rank.
  struct Fate {
    enum class What {
      kLost,        ///< its process cannot be talked to any more
      kLeft,        ///< it has destroyed the group
      kGaveThisUp,  ///< it takes this process for lost, which it is to that rank from then on
    };
    int rank = kNobody;
    What what = What::kLost;
    std::string why{};  ///< of what is lost, or has given up
    bool left() const { return what == What::kLeft; }
  };
  /// A rank has failed the group, and says why.
  struct Told {
    int by = kNobody;
    Failure failure;
  };
  /// A piece of mail that has come: an announcement, or an answer to one.
  struct Letter {
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
  /// The messenger's, which guards all of this.
  Mutex& mutex() RETURN_CAPABILITY(messenger_->mutex()) { return messenger_->mutex(); }
  int rank() const { return rank_; }

  void connect(int rank, std::span<const std::byte> address) REQUIRES(messenger_->mutex());
  /// Says which rank of the whole job this rank is; see Messenger::meet.
  void meet(int rank, uint64_t global_rank, std::weak_ptr<void> standing, std::string known_as)
      REQUIRES(messenger_->mutex()) {
    messenger_->meet(global_rank, ranks_[size_t(rank)].peer, std::move(standing), std::move(known_as));
  }
  /// From here on nothing is sent or taken in. Peers that ask whether the group is here are told that it is not.
  void leave() REQUIRES(messenger_->mutex());

  // --- runs
  void open(ScheduleRun& run) REQUIRES(messenger_->mutex());
  void close(ScheduleRun& run) REQUIRES(messenger_->mutex());
  /// Gives a run what has come of a message before its step had begun.
  void offer_early(ScheduleRun& run, int from, uint16_t message) REQUIRES(messenger_->mutex());
  /// Notes which operation begins, and what is called. The last few are kept for peers that ask.
  void begin_operation(uint32_t op, const Label& label) REQUIRES(messenger_->mutex());
  /// Shows a rank that is waited for what is called here: if it calls, or called, something else, both sides learn so.
  enum class Asks { kYes, kNo };
  void show_label(int rank, uint32_t op, Asks asks = Asks::kYes) REQUIRES(messenger_->mutex());
  bool has_called(int rank, uint32_t op) const REQUIRES(messenger_->mutex()) {
    return int32_t(ranks_[size_t(rank)].called - op) >= 0;
  }
  /// A rank that calls something else as this operation, and what.
  std::optional<std::pair<int, Label>> clash(uint32_t op) const REQUIRES(messenger_->mutex());
  /// What was called here as this operation, if it is one of the last ones.
  std::optional<Label> called_here(uint32_t op) const REQUIRES(messenger_->mutex());
  /// Operations before this one are over here: what still comes for them is a mismatch, or late.
  void end_operation(uint32_t op) REQUIRES(messenger_->mutex());
  /// A label that came for an operation which is over here, and which may differ from what was called here.
  struct Stray {
    int rank;  ///< that sent it
    uint32_t op;
    Label label;
  };
  std::optional<Stray> stray() REQUIRES(messenger_->mutex());
  /// Whether a segment of this size may go to a rank now; if so, it is counted as sent. Unacknowledged cost is bounded
  /// by kCredit; empty segments cost kSegmentCost. While less than kCreditStep is owed, one segment of any length may
  /// go.
  bool spend(int rank, size_t bytes) REQUIRES(messenger_->mutex());
  void took_in(int rank, size_t bytes) REQUIRES(messenger_->mutex());
  void send(int rank, MessageHeader header, std::span<const std::byte> behind, std::span<const std::byte> body,
            Sender* sender, uint64_t cookie) REQUIRES(messenger_->mutex());
  /// Asks the rank for a sign of life.
  void ask(int rank) REQUIRES(messenger_->mutex());
  /// For what ends badly while the link still has bodies of it for this rank, or from it: closes the connection, so
  /// that the link lets go of them.
  void sever(int rank) REQUIRES(messenger_->mutex());

  // --- failure
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const std::optional<Told>& told() const REQUIRES(messenger_->mutex()) { return told_; }
  /// hear is called once, when another rank fails the group: with the messenger's lock held, on whatever thread drives
  /// the messenger.
  void on_failure(std::function<void(const Told&)> hear) REQUIRES(messenger_->mutex());
  /// What is known of a rank: lost, or left; nothing while it is there.
  std::optional<Fate> fate(int rank) REQUIRES(messenger_->mutex());
  /// For how long a rank that is waited for has been asked for a sign of life in vain; 0 where it has not.
  Clock::duration silence(int rank) const REQUIRES(messenger_->mutex());
  std::string unheard(int rank) REQUIRES(messenger_->mutex());  ///< as Messenger's
  /// Tells these ranks why the group has failed here.
  void poison(const Failure& why, const std::vector<int>& ranks) REQUIRES(messenger_->mutex());
  /// Tells whoever waits for this rank, now or later, of what another group of this process has failed. Only the first
  /// call counts.
  void tell_trouble(const Failure& what) REQUIRES(messenger_->mutex());
  /// What a rank has told of its other groups in this way, in words; empty if nothing.
  const std::string& trouble(int rank) const REQUIRES(messenger_->mutex()) { return ranks_[size_t(rank)].trouble; }
  /// Which process a rank is, on the wire; nothing where there is no such rank, or no address of it is known.
  std::optional<PeerId> process_of(int rank) const REQUIRES(messenger_->mutex()) {
    const size_t r = size_t(rank);
    return r < ranks_.size() && ranks_[r].known ? std::optional(ranks_[r].peer) : std::nullopt;
  }
  /// The ranks that something has been sent to or has come from, a question included.
  std::vector<int> acquaintances() const REQUIRES(messenger_->mutex());

  // --- monitored barrier
  void monitor_in(int rank, uint64_t turn) REQUIRES(messenger_->mutex());
  void monitor_out(int rank, uint64_t turn) REQUIRES(messenger_->mutex());
  /// The last barrier that a rank has come to (rank 0: that it has begun), and the last one that rank 0 has let all
  /// leave.
  uint64_t monitored_in(int rank) const REQUIRES(messenger_->mutex()) { return ranks_[size_t(rank)].monitored; }
  uint64_t monitored_out() const REQUIRES(messenger_->mutex()) { return monitored_out_; }

  // --- mail
  /// poke is called when there may be mail, or a transfer's end, to ask for; also when the group fails.
  void on_mail(std::function<void()> poke) REQUIRES(messenger_->mutex()) { poke_ = std::move(poke); }
  /// The letters, in the order in which they came.
  std::optional<Letter> next_letter() REQUIRES(messenger_->mutex());
  /// These send a letter each. A grant says, too, that the message is to be written to this memory.
  void announce(int rank, const MailHead& head, std::span<const std::byte> body) REQUIRES(messenger_->mutex());
  void tell_taken(int rank, const Taken& taken) REQUIRES(messenger_->mutex());
  void grant(int rank, uint64_t number, std::byte* data, size_t bytes) REQUIRES(messenger_->mutex());
  /// The large messages that have been granted, either way.
  Rendezvous& rendezvous() { return rendezvous_; }
  /// Lets go of all memory of messages, in bounded time.
  void drop_mail() REQUIRES(messenger_->mutex());

  // --- for the messenger: what comes. place() and dropped() are as those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes) REQUIRES(messenger_->mutex());
  void arrived(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  void dropped(const MessageHeader& header, const std::byte* where) REQUIRES(messenger_->mutex());
  /// The rank has asked for a sign of life, as that process.
  void asked_by(uint32_t rank, PeerId peer) REQUIRES(messenger_->mutex());
  /// The rank's process says that this group is gone there.
  void note_left(uint32_t rank) REQUIRES(messenger_->mutex());

 private:
  struct Rank {
    PeerId peer = 0;
    bool known = false;  // has an address
    bool acquainted = false;
    bool left = false;
    bool told_trouble = false;
    std::string trouble{};
    uint64_t monitored = 0;
    uint64_t owed = 0;      // cost of what was sent to it and it has not acknowledged
    uint32_t called = 0;    // the last operation that it is known to have called
    uint64_t kept = 0;      // cost of what came from it too early
    uint64_t letters = 0;   // cost of the letters from it that nobody has read yet
    uint64_t taken_in = 0;  // cost of what was taken in from it and is not yet acknowledged
  };
  /// A segment that came before its step, kept by the message that it is of. A root's receivers, and ranks that are
  /// behind, have thousands of segments waiting here.
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
  void let_go(const Early& early) REQUIRES(messenger_->mutex());
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
  uint32_t ended_ = 0;  // operations before this one are over here
  std::optional<Stray> stray_;
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
  std::function<void()> poke_ = [] {};  // may be called with the messenger's lock held
  std::deque<Letter> letters_;
  Rendezvous rendezvous_{*this, /*poke=*/[this] { poke_(); }};
};

}  // namespace nvx::net
