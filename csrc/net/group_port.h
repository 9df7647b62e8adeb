#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/failure_note.h"
#include "net/call_fingerprints.h"
#include "net/liveness.h"
#include "net/messenger.h"
#include "net/point_to_point.h"
#include "net/segment_flow.h"

namespace nvx::net {

class ScheduleRun;

/// A group's end of the messenger, for one of its ranks: its peers, runs and failure, and the monitored barrier. The
/// caller holds the messenger's lock, except for failed().
class GroupPort {
 public:
  /// How a rank has ended.
  struct Departure {
    enum class Cause {
      kLost,              ///< its process cannot be reached any more
      kLeft,              ///< it has destroyed the group
      kDeclaredThisLost,  ///< it considers this process lost, so this process considers it lost too
    };
    int rank = kNoRank;
    Cause cause = Cause::kLost;
    std::string why{};  ///< for kLost and kDeclaredThisLost
    bool left() const { return cause == Cause::kLeft; }
  };
  struct ReportedFailure {
    int by = kNoRank;
    Failure failure;
  };
  /// The failure of another group of a rank's process.
  struct OtherFailure {
    std::string text{};
    std::optional<Clock::time_point> gave_up_at{};  ///< when the rank gave up a wait for this one there
  };

  GroupPort(std::shared_ptr<Messenger> messenger, uint64_t group, int rank, int size);
  ~GroupPort();

  Messenger& messenger() { return *messenger_; }
  Mutex& mutex() RETURN_CAPABILITY(messenger_->mutex()) { return messenger_->mutex(); }
  CallFingerprints& calls() { return calls_; }
  SegmentFlow& flow() { return flow_; }
  PointToPoint& p2p() { return p2p_; }

  void connect(int rank, std::span<const std::byte> address) REQUIRES(messenger_->mutex());
  /// Stops sending and receiving. Pings of the group are answered with kGroupGone.
  void leave() REQUIRES(messenger_->mutex());
  /// As Messenger::send(), to a rank. A rank whose address is unknown counts as lost.
  void send(int rank, MessageHeader header, std::span<const std::byte> behind = {},
            std::span<const std::byte> body = {}, Sender* sender = nullptr, uint64_t cookie = 0)
      REQUIRES(messenger_->mutex());
  void ping(int rank) REQUIRES(messenger_->mutex());
  /// Closes the connection to a rank, so that the link releases buffers of a failed operation.
  void disconnect(int rank, const char* why = "a failed operation still had messages to it in flight")
      REQUIRES(messenger_->mutex());
  /// The peer number of a rank, or nothing if there is no such rank or its address is unknown.
  std::optional<PeerId> process_of(int rank) const REQUIRES(messenger_->mutex()) {
    return size_t(rank) < ranks_.size() ? ranks_[size_t(rank)].peer : std::nullopt;
  }
  /// The ranks with which any message, including a ping, was exchanged.
  std::vector<int> contacts() const REQUIRES(messenger_->mutex());

  // --- runs
  void open(ScheduleRun& run) REQUIRES(messenger_->mutex());
  void close(ScheduleRun& run) REQUIRES(messenger_->mutex()) { std::erase(runs_, &run); }
  /// Whether all runs that were opened before this one are done.
  bool is_oldest(const ScheduleRun& run) const REQUIRES(messenger_->mutex());
  /// Sends a rank that is waited for this rank's fingerprint. If it calls something else, both ranks detect it.
  enum class Reply { kNone, kRequested };
  void send_fingerprint(int rank, uint32_t op, Reply reply = Reply::kRequested) REQUIRES(messenger_->mutex());
  /// Ends all operations before `op`. Messages for them that still arrive are late or a mismatch.
  void end_operation(uint32_t op) REQUIRES(messenger_->mutex());

  // --- failure
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const std::optional<ReportedFailure>& reported() const REQUIRES(messenger_->mutex()) { return reported_; }
  /// `handler`: called once, when another rank fails the group, on the thread that drives, with the messenger's lock.
  void on_failure(std::function<void(const ReportedFailure&)> handler) REQUIRES(messenger_->mutex());
  /// How a rank has ended: lost or left; nothing while it is alive.
  std::optional<Departure> departure(int rank) REQUIRES(messenger_->mutex());
  /// How long a rank that is waited for has not answered pings; 0 if it was not pinged.
  Clock::duration silence(int rank) const REQUIRES(messenger_->mutex());
  /// As Messenger::obstacle(), for a rank.
  std::string obstacle(int rank) REQUIRES(messenger_->mutex());
  /// Reports the group's failure on this rank to these ranks. Messenger::flush_reports() waits for it.
  void poison(const Failure& why, const std::vector<int>& ranks) REQUIRES(messenger_->mutex());
  /// Reports the failure of another group of this process to all ranks that wait for this one, now or later. Only the
  /// first call counts.
  void report_other_failure(const Failure& what) REQUIRES(messenger_->mutex());
  /// Such a report from a rank; an empty text if there was none.
  const OtherFailure& other_failure(int rank) const REQUIRES(messenger_->mutex()) {
    return ranks_[size_t(rank)].other_failure;
  }

  // --- monitored barrier: kMonitorIn and kMonitorOut
  /// The last barrier that a rank has entered (rank 0: begun), and the last one that rank 0 has released.
  uint64_t monitored_in(int rank) const REQUIRES(messenger_->mutex()) { return ranks_[size_t(rank)].monitored; }
  uint64_t monitored_out() const REQUIRES(messenger_->mutex()) { return monitored_out_; }

  // --- Called by the messenger. place() and dropped() are those of Receiver.
  std::byte* place(const MessageHeader& header, size_t bytes) REQUIRES(messenger_->mutex());
  void arrived(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  void dropped(const MessageHeader& header, const std::byte* where) REQUIRES(messenger_->mutex());
  /// A ping from the rank has arrived, from that process.
  void pinged_by(uint32_t rank, PeerId peer) REQUIRES(messenger_->mutex());
  /// The rank's process has answered that this group is gone there, or that it considers this process lost.
  void note_departure(Departure departure) REQUIRES(messenger_->mutex());

 private:
  struct Rank {
    std::optional<PeerId> peer{};  // once its address is known
    bool contacted = false;
    Clock::time_point pinged{};
    std::optional<Departure> departure{};  // by an answer of its process
    bool sent_other_failure = false;
    OtherFailure other_failure{};
    uint64_t monitored = 0;
  };

  void take_segment(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  void take_other_failure(Rank& from, const MessageHeader& header, std::span<const std::byte> body)
      REQUIRES(messenger_->mutex());
  void take_fingerprint(const MessageHeader& header, std::span<const std::byte> whole) REQUIRES(messenger_->mutex());
  void fail(ReportedFailure reported) REQUIRES(messenger_->mutex());
  void send_other_failure(int rank) REQUIRES(messenger_->mutex());

  std::shared_ptr<Messenger> messenger_;
  const uint64_t group_;
  const int rank_;
  std::vector<Rank> ranks_;
  std::vector<ScheduleRun*> runs_;
  CallFingerprints calls_;
  SegmentFlow flow_;
  PointToPoint p2p_;
  bool left_ = false;
  std::atomic<bool> failed_{false};
  std::optional<ReportedFailure> reported_;
  std::function<void(const ReportedFailure&)> on_failure_;
  std::optional<FailureNote> other_failure_;  // of other groups of this process
  Clock::time_point other_failed_at_{};       // since then
  uint64_t monitored_out_ = 0;
};

/// The reason for disconnect() where a rank sends more than this rank can store.
inline constexpr char kExceedsCredit[] = "it sends more than its credit allows";

}  // namespace nvx::net
