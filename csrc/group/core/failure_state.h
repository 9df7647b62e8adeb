#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/flag.h"
#include "base/mutex.h"
#include "group/core/diagnosis.h"
#include "group/core/status.h"
#include "group/setup/members.h"
#include "net/group_port.h"

namespace nvx {

/// The failure state of a group. Stores the first failure and reports it to the ranks of this host, to other hosts and
/// to other groups of the process. Detects failures of all three, and processes that ended. Any thread may call it.
class FailureState final : public Watch {
 public:
  /// `port`: null if all ranks are on one host. `membership`: released when this rank leaves or fails; see
  /// `ShmRegistry::note_rank`. The referenced objects must outlive this one, except in a forked child.
  FailureState(const Members& members, const Diagnosis& diagnosis, GroupStatus& status, net::GroupPort* port,
               std::shared_ptr<bool> membership);

  /// `act` runs once, when the group fails, with no lock held. Call this before other threads know the group.
  void on_failure(std::function<void(const Status&)> act) { act_ = std::move(act); }

  // --- the first failure

  bool failed() const { return failed_.load(std::memory_order_seq_cst); }
  Status failure() const EXCLUDES(mutex_);
  /// Stores the first failure and reports it. Returns the stored one, which may be an earlier one.
  Status fail(Failure failure) EXCLUDES(mutex_);
  /// The same for an operation that a device has begun: peers wait for it, so kInvalid fails the group too.
  Status fail_begun(const Status& status);

  // --- whether operations may begin

  /// In a child forked from the rank's process every operation is refused: the group belongs to the parent.
  bool forked() const { return fork_generation_ != nvx::fork_generation(); }
  /// Whether this rank has left. Seq_cst, like `failed()`: `of_devices()` in `torch/call/groups.cc` stores its flag
  /// before it reads the two, so either it sees a leave or abort, or the leaving or aborting thread sees the flag.
  bool closed() const { return closed_.load(std::memory_order_seq_cst); }
  /// Marks this rank as leaving. False if it had left before. On return, other threads have reported the failure that
  /// they have stored: otherwise the peers might hear first that this rank has left, and would not learn the cause.
  bool close();
  /// The process no longer watches the peers for this group; see `SetUp::Made::membership`.
  void forget_peers() EXCLUDES(mutex_);
  /// The last step of leaving: signals the ranks of this host that this rank accesses no memory of theirs.
  void announce_left() EXCLUDES(mutex_);
  /// The reason why no operation can begin, or ok. `what`: the operation.
  Status check_alive(const char* what = "this call") const;
  /// The result of an operation that begins after the group has failed.
  Status failed_before(const std::string& what) const;

  // --- failures of others

  static constexpr std::chrono::milliseconds kEndingGrace{50};
  /// Fails the group if another rank has reported a failure: an operation that one rank gave up must not succeed
  /// elsewhere. Waits up to `grace` for a more exact report about a rank of this host.
  bool check_reports(Clock::duration grace = kEndingGrace);
  /// Only the wait of `check_reports()`. For callers that fail the group later, with a lock held and no grace.
  void await_exact_report() const;
  /// Fails the group if a rank of this host has reported a failure.
  bool fail_as_reported();
  /// Fails the group because of a rank of this host whose process has ended, or that has left.
  void fail_as_gone(int local_rank);
  Status fail_as_left(int rank);
  /// The same for a rank of another host.
  Status fail_by_departure(const net::GroupPort::Departure& departure);
  /// For waits outside of memory: fails the group if a rank has reported a failure, or if a process of this host has
  /// ended. Ok if this rank has left.
  Status check_peers();
  /// Fails the group if this is the main thread and the user interrupts it.
  bool check_interrupt();
  /// For the port, with its lock held: passes a report of another host on at once, since this rank itself may be busy.
  void pass_on(const net::GroupPort::ReportedFailure& report) EXCLUDES(mutex_);

  // --- waits

  bool should_abort(int local_rank) override;
  void record_abort(int local_rank) override { record_abort(local_rank, kEndingGrace); }
  void sleeps(int local_rank) override;
  void waited(int local_rank, Clock::time_point began, Clock::duration slept) override;
  void record_abort(int local_rank, Clock::duration grace);
  /// The status of a wait that ended without success. An empty `awaited`: any rank.
  Status explain_wait(Waited how, const Awaited& awaited, const std::string& what, const Deadline& deadline);
  /// How long a wait that has timed out waits for a report of a rank that can name the missing one more exactly.
  void set_report_grace(std::chrono::milliseconds span) { report_grace_.store(span, std::memory_order_relaxed); }

  // --- other groups of the process

  /// A process that a group has found dead, or to which it has lost the connection.
  struct Lost {
    const PeerProcess* local = nullptr;
    const net::Messenger* messenger = nullptr;
    net::PeerId remote = 0;
  };
  /// Another group of this process has failed because of `other_failure`. Fails this one too if it has lost the same
  /// process. Otherwise reports it to the ranks, which may wait for this one.
  void on_failure_of_other_group(const std::vector<Lost>& lost, const Failure& other_failure) EXCLUDES(mutex_);

 private:
  /// Counts a call that has stored the failure until it has reported it.
  struct Reporting {
    explicit Reporting(std::atomic<int>& calls) : calls(calls) { calls.fetch_add(1); }
    ~Reporting() { calls.fetch_sub(1); }
    std::atomic<int>& calls;
  };
  void note(const Failure& failure) REQUIRES(mutex_);
  void report_to_other_groups(const Failure& failure);
  std::vector<Lost> lost_ranks() const;
  bool fail_as_lost(const Lost& lost);
  bool reported_in_time();
  int first_reporter() const;
  std::optional<net::GroupPort::ReportedFailure> report() const;
  void fail_as_reported(const net::GroupPort::ReportedFailure& report, Clock::duration grace);
  int seen_to_end(const Failure& report, Clock::duration grace) const;

  const Members& members_;
  const Diagnosis& diagnosis_;
  GroupStatus& status_;
  net::GroupPort* const port_;
  const uint32_t fork_generation_;
  std::function<void(const Status&)> act_ = [](const Status&) {};

  std::atomic<bool> failed_{false};
  std::atomic<bool> closed_{false};
  std::atomic<int> reporting_{0};
  std::atomic<std::chrono::milliseconds> report_grace_{std::chrono::milliseconds(0)};
  mutable Mutex mutex_;
  Status failure_ GUARDED_BY(mutex_);
  std::shared_ptr<bool> membership_ GUARDED_BY(mutex_);
};

}  // namespace nvx
