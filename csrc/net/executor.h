#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "kernel/reduce/level.h"
#include "net/group_port.h"
#include "schedule/catalog.h"

namespace nvx::net {

enum class Progress { kPending, kDone, kFailed };

using schedule::kMaxDepth;

struct ScheduleArgs {
  const schedule::Row* row = nullptr;
  schedule::Layout layout;
  int place = 0;                 ///< this rank's among the participants
  std::span<const int> members;  ///< the group's rank for each place
  std::span<const char> absent;  ///< by place: steps with absent places are skipped on both sides; may be empty
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* scratch = nullptr;
  kernel::ReduceFn reduce = nullptr;
  /// All three are in memory of a device, which the host never reads or writes: the schedule only moves data between
  /// ranks, and a message is sent when its receiver has announced that its place is free. The same on all ranks.
  bool on_device = false;
  FingerprintBytes fingerprint{};
  uint32_t op = 0;        ///< the group's operation between hosts
  uint16_t run = 0;       ///< the run of that operation
  int depth = kMaxDepth;  ///< the maximum number of steps in flight
};

/// Advances one schedule over a port. All of a collective's bytes between hosts move here. Never blocks. The
/// messenger's lock guards it.
///
/// The hazard rule: a step begins when no step in flight still writes anything that it reads or writes, and none still
/// reads anything that it writes. Segments for a step that has not begun wait in the port.
class ScheduleRun final : public Sender {
 public:
  /// Why a run failed, beyond what the port records.
  struct Verdict {
    enum class Cause { kNone, kMismatch, kCounts, kGarbage, kLost } cause = Cause::kNone;
    int rank = -1;
    FingerprintBytes theirs{};
    uint64_t mine = 0, other = 0;  ///< kCounts: the bytes expected here, and those offered
  };

  ScheduleRun(GroupPort& port, ScheduleArgs args);
  ~ScheduleRun() override;
  ScheduleRun(const ScheduleRun&) = delete;

  Progress advance();
  bool done() const { return next_ == steps_ && first_ == behind_; }
  const Verdict& verdict() const { return verdict_; }
  /// The ranks whose messages it waits for, and those that have not received its own; empty when it is done.
  std::vector<int> waits_for() const;
  /// Those of them that have to send something, and that are not known to have called this operation.
  std::vector<int> not_called() const;
  /// The rank that the oldest step in flight waits for; -1: none.
  int waits_first_for() const;
  /// Checks the ranks that it waits for: pings them, and fails with the first that is lost.
  void check_peers();
  /// Gives up these runs of a port. On return nothing accesses their memory any more. Takes a bounded time.
  static void abandon(GroupPort& port, std::span<ScheduleRun* const> runs);

  // --- Called by the port.
  /// Identifies the run.
  uint32_t op() const { return args_.op; }
  uint16_t number() const { return args_.run; }
  bool owns(const MessageHeader& header) const { return header.op == op() && header.run == number(); }
  /// The outcome of offering a segment: received, to be offered again later, or refused.
  enum class Outcome { kYes, kLater, kNever };
  Outcome take(const MessageHeader& header, const std::optional<First>& first, std::span<const std::byte> body);
  /// See Receiver::place() and Receiver::dropped().
  std::byte* place(const MessageHeader& header, size_t bytes);
  void dropped(const MessageHeader& header);
  /// Fails the run if the rank's fingerprint differs from this rank's.
  void compare(uint32_t from, const First& first);

 private:
  struct Flight {
    schedule::Step step;
    uint16_t out_number = 0, in_number = 0;
    size_t posted = 0;       // bytes of the outgoing message that were passed to the link
    bool posted_all = true;  // needed for an empty message
    bool may_post = true;    // its receiver is ready for it
    int unread = 0;          // posts that the link still reads
    size_t received = 0;
    bool received_all = true;
    bool early = false;      // the port may have segments of its message
    int fetching = 0;        // segments that the link is writing to their place
    std::vector<bool> seen;  // segments that have arrived or are being fetched

    bool sends_over() const { return posted_all && unread == 0; }
    bool over() const { return sends_over() && received_all; }
    int in_link() const { return unread + fetching; }
  };

  int in_link() const;
  void disconnect();
  void sent(uint64_t cookie, const Status& status) override;
  bool begin_steps();
  bool begin_next();
  bool clear_for(const schedule::Step& step) const;
  bool would_overwrite_own(const Flight& flight, const std::byte* to, size_t bytes) const;
  void move_inside(const schedule::Step& step);
  void begin(const schedule::Step& step);
  void post(Flight& flight);
  MessageHeader header_of(Kind kind, uint16_t message) const;
  void send_ready(const Flight& flight);
  void reap();
  Flight* flight_of(uint32_t rank, uint16_t number);
  bool fits(const Flight& flight, uint32_t segment, size_t bytes) const;
  bool claim(Flight& flight, uint32_t segment);
  void store(Flight& flight, size_t offset, std::span<const std::byte> body);
  bool end_fetch(Flight& flight, const MessageHeader& header, std::span<const std::byte> body) const;
  Outcome verdict_on(Flight* flight, const MessageHeader& header, const std::optional<First>& first,
                     std::span<const std::byte> body, bool fetched);
  Outcome refuse(const Verdict& verdict);
  std::byte* at(const schedule::Range& range) const;
  bool absent(int place) const { return place >= 0 && !args_.absent.empty() && args_.absent[size_t(place)]; }
  int rank_of(int place) const { return args_.members[size_t(place)]; }

  GroupPort& port_;
  ScheduleArgs args_;
  uint64_t next_ = 0;
  const uint64_t steps_;
  std::array<Flight, kMaxDepth> flights_;
  uint32_t first_ = 0, behind_ = 0;  // flights_[first_ .. behind_), modulo its size
  struct Messages {
    uint16_t sent = 0, received = 0;
  };
  std::vector<Messages> messages_;  // numbers of messages, by place
  int checks_ = 0;
  bool given_up_ = false;  // nothing more begins or is received
  Verdict verdict_;
};

}  // namespace nvx::net
