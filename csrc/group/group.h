#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/mutex.h"
#include "base/words.h"
#include "group/device/group_device.h"
#include "group/engine.h"
#include "group/group_options.h"
#include "group/meet/store.h"
#include "group/meet/topology.h"
#include "group/members.h"
#include "group/operation.h"
#include "group/plan/plan.h"
#include "kernel/cpu/channel.h"
#include "memory/shm/leases.h"
#include "net/group_port.h"

namespace nvx {

class Mailbox;
class Hierarchical;

/// What to do about a collective mismatch.
inline constexpr const char* kCallAlike =
    "make all ranks call the same collectives in the same order, with the same shapes, types and operators";
inline constexpr const char* kCompareSplits = "compare the split sizes of the two ranks";
/// ... and about what has happened to a rank, or on it: "rank 3".
inline std::string see_log_of(const std::string& rank) { return "see the log of " + rank; }

/// Ranks that a wait is for; words: how they are called, and how far they have come, where that is known.
struct Awaited {
  std::vector<int> ranks;
  std::string words;
};

/// One step of a collective inside a host, as the kernels see it: roots and pieces by local_rank.
struct Stage {
  kernel::Collective collective = kernel::Collective::kNone;  ///< the row of the plan
  int root = -1;
  size_t bytes = 0;  ///< what the plan is asked about
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
  const kernel::Piece* send = nullptr;
  const kernel::Piece* recv = nullptr;
  ReduceOp op = ReduceOp::kSum;  ///< of what is combined
  double factor = 1;             ///< of this rank's elements, where that is kPremulSum
};

/// The ranks of one process group, seen from one of them. Owns all that the group has: its pad, its staging, its order
/// of operations, its mail, its port to other hosts. Collectives go through the lane, one at a time; mail goes apart
/// from them. The first failure stays.
class Group : public Watch, public LeaseHolder, public std::enable_shared_from_this<Group> {
 public:
  /// Meets the other ranks through the store; returns when all have mapped each other. Throws Error.
  Group(Store& store, const GroupOptions& options);
  ~Group() override;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  /// What its ranks, and no other group, are known by.
  uint64_t id() const { return members_.id; }
  /// Which ranks of the whole job these are; empty where that is not known.
  const std::vector<uint64_t>& global_ranks() const { return options_.global_ranks; }
  const Topology& topology() const { return members_.topology; }
  const PlanFacts& plan_facts() const { return members_.facts; }

  /// Runs a collective on the caller's thread at once if the lane is free, and behind what is queued otherwise. Refuses
  /// one from inside another one of this group, as a signal handler may call it that runs while that waits.
  Status execute(Operation& operation);
  /// What is said then, of whatever would wait for its own end.
  Status inside_itself() const;
  /// Runs a collective on this thread, which holds the lane.
  Status run(Operation& operation, Carrier carrier);
  /// One step of it inside the host. `operation` is what the user called, for the fingerprint and for errors.
  Status run_stage(const Stage& stage, const Operation& operation, const WaitRules& rules);
  Lane& lane();
  Mailbox& mail() { return *mailbox_; }

  /// Rank 0 waits for all and tells them; the error there names who is missing, the first one or all of them. The group
  /// stays usable.
  Status monitored_barrier(std::chrono::milliseconds timeout, bool name_all);

  /// What it does on GPUs.
  GroupDevice& device() { return device_; }

  /// Fails the group if a rank of its host has ended, or any has said that it failed: for who waits for them outside of
  /// memory. Who has left looks at nobody.
  Status look_around();
  /// The same for what waits for a rank in the store: throws Error where that has become pointless, as when the user
  /// does not want it any more, or this rank has left.
  void look_while_waiting(int writer);

  /// For an operation that a proxy carries out, on devices and the host. First, before it has a number: has the proxy
  /// make room for it. Then, at the call: begins what it does on devices; where that fails, so does the group.
  Status make_room(const Operation& operation);
  Status launch(const Operation& operation, Begins begins = Begins::kNow);
  /// Fails the group because of what has kept an operation from its end that has been begun on a device.
  Status fail_begun(const Status& status);

  /// Counts an operation when it is issued, in the order of the program.
  uint64_t next_number() { return sequence_.fetch_add(1, std::memory_order_relaxed) + 1; }
  /// Collectives issued so far.
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  /// Ends what is in flight here, and refuses what comes. Local, does not wait for anybody, may be called at any time.
  void abort(const std::string& why);
  /// Says goodbye: peers that still wait for this rank are told. Does not wait for them. Idempotent. From inside an
  /// operation of this group: refuses what comes, ends that operation, and says goodbye when it has ended.
  void leave();

  /// Whether this is a child that was forked from the rank's process: to it the group is nothing, and all that it calls
  /// says so or does nothing.
  bool forked() const;
  /// Why no operation can begin, or ok.
  Status check_alive() const;
  /// Fails the group if another rank has said that it has failed it. What it says of a rank of this host may become
  /// clearer in a moment, which this waits for, up to kClarity; or not at all, where the caller holds a lock.
  bool told(Clock::duration clarity = kClarity);
  static constexpr std::chrono::milliseconds kClarity{50};
  /// What is said then to an operation that has yet to begin.
  Status came_late(const std::string& what) const;
  /// Whether this rank has left. Two groups of one backend are ended by this and failed() being seq_cst: see
  /// torch/backend.cc, device_group().
  bool closed() const { return left_.load(std::memory_order_seq_cst); }
  /// Fails the group if this is the main thread and the user wants it to stop.
  bool look_for_interrupt();
  bool failed() const { return failed_.load(std::memory_order_seq_cst); }
  /// Whether the program has been told of a failure, as by an exception.
  void note_heard() { heard_.store(true, std::memory_order_relaxed); }
  bool heard() const { return heard_.load(std::memory_order_relaxed); }
  Status failure() const;
  /// Stores the first failure and tells the peers; returns the one that is stored.
  Status fail(Failure failure);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count(), std::memory_order_relaxed); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  /// How long an operation with this timeout of its own (0: none) may wait; 0: for ever.
  std::chrono::milliseconds span_of(std::chrono::milliseconds own) const;
  /// How an operation with this timeout of its own waits.
  WaitRules rules(std::chrono::milliseconds own, Carrier carrier);
  WaitRules rules_of(const Operation& operation, Carrier carrier);

  bool alarmed(int local_rank) override;
  void alarm(int local_rank) override { alarm(local_rank, kClarity); }
  /// As told() does, for what another rank has said.
  void alarm(int local_rank, Clock::duration clarity);
  /// The wait alone, if there is anything to wait for: before a lock is taken, and the group failed with it held.
  void await_clarity() const;
  /// Whether the rank has ended, or left.
  bool gone(int local_rank) const { return members_.gone(local_rank); }
  Span yield() override;

  /// The status for a wait that ended badly. Of any rank, if none are named.
  Status explain_wait(Waited how, const Awaited& whom, const std::string& what, const Deadline& deadline);

  /// How long a wait that has run out of time listens for a rank that knows better who is missing.
  void doubt(std::chrono::milliseconds span) { doubt_.store(span, std::memory_order_relaxed); }
  /// Fails the group if a rank of this host has said why it failed.
  bool fail_as_told();
  /// Fails the group for what has become of a rank of this host, which has ended or left; ...
  void fail_as_gone(int local_rank);
  /// ... and of one of another host.
  Status fail_by_fate(const net::GroupPort::Fate& fate);
  /// "rank 1", or where that is another one of the whole job, "rank 1 (global rank 3)".
  std::string rank_name(int rank) const { return nvx::rank_name(rank, options_.global_ranks); }
  /// A process that a group has found dead, or to which it has lost the connection.
  struct Lost {
    const Neighbour* near = nullptr;
    const net::Messenger* messenger = nullptr;
    net::PeerId far = 0;
  };
  /// Another group of this process has failed, and why: fails this one too if it has lost a rank by that, and else
  /// tells its ranks, which may wait for this one, and be left waiting.
  void hear_of(const std::vector<Lost>& lost, const Failure& trouble);

  /// The ranks of this host, by local_rank.
  const std::vector<int>& here() const { return members_.here(); }
  int local_rank() const { return members_.local_rank(); }
  int local_ranks() const { return members_.local_ranks(); }
  /// -1 for a rank of another host.
  int local_rank_of(int rank) const { return members_.local_rank_of(rank); }
  kernel::Pad pad(int local_rank) const { return members_.pad(local_rank); }
  kernel::Pad own_pad() const { return members_.own_pad(); }
  kernel::CachePolicy policy_to_keep(size_t bytes) const { return nvx::policy_to_keep(bytes, plan_facts()); }
  const kernel::PeerMemory& memory(int local_rank) const { return members_.memory[size_t(local_rank)]; }
  /// Null where all ranks are on one host.
  net::GroupPort* port() { return port_.get(); }
  Neighbours& neighbours() { return *members_.neighbours; }
  /// Holds when no peer can touch any more what this group exported.
  std::function<bool()> everybody_gone() const { return members_.everybody_gone(); }

 private:
  Status carry_out(Operation& operation, Carrier carrier);
  Status refusal() const;
  void unmake();
  void describe_itself() const;
  void part();
  void warn_of_differing_calls() const;
  size_t staged_bytes(const Operation& operation) const;
  void hold_lease(size_t bytes);
  void rest_lease();
  Status explain_verdict(const kernel::Verdict& verdict, const Operation& operation, const Deadline& deadline);
  Awaited missing_ranks();
  std::string describe_progress(int local_rank) const;
  uint32_t where_they_parted(int local_rank, uint32_t epoch) const;
  bool read_by_all(uint32_t epoch) const;
  bool dead(int local_rank) const { return members_.dead(local_rank); }
  int told_by() const;
  void note_failure(const Failure& failure) REQUIRES(failure_mutex_);
  void pass_on(const net::GroupPort::Told& told) EXCLUDES(failure_mutex_);
  void tell_other_hosts(const Failure& failure);
  void tell_other_groups(const Failure& failure);
  std::vector<Lost> lost_ranks();
  bool fail_as_lost(const Lost& lost);
  std::string trouble_of(int rank);
  int seen_to_end(const Failure& told, Clock::duration clarity) const;
  std::string silence_of(int rank);
  std::optional<net::GroupPort::Told> what_is_told() const;
  void fail_as_told(const net::GroupPort::Told& told, Clock::duration clarity);
  net::GroupPort::Told read_note_of(int local_rank) const;
  void fail_as_left(int rank);
  /// Of monitored barriers: the last one that rank 0 has begun, and the last one from which it has let all go.
  struct Turns {
    Stamp opened = 0, ended = 0;
  };
  void open_turn(Stamp turn);
  Waited check_in(const WaitRules& rules);
  Turns turns_of_rank_0() const;
  void join_turn(Stamp turn);
  Waited await_turns(const std::function<bool(const Turns&)>& moved, const WaitRules& rules);
  Status came_not(const std::vector<int>& missing, bool all, const std::string& me, const Deadline& deadline) const;
  Waited await_far(int rank, const std::function<bool()>& said, const WaitRules& rules);
  bool told_in_time();
  Waited await_check_in(int rank, Stamp turn, const WaitRules& rules);
  std::string describe_local_rank(int local_rank) const { return members_.describe_local_rank(local_rank); }

  GroupOptions options_;
  uint32_t fork_generation_;
  Members members_;  // as set-up has left them
  std::unique_ptr<kernel::Channel> channel_;
  std::shared_ptr<Lane> lane_;
  std::unique_ptr<net::GroupPort> port_;
  std::unique_ptr<Hierarchical> hierarchical_;  // with the port
  std::unique_ptr<Mailbox> mailbox_;

  GroupDevice device_;

  Courtesy courtesy_;
  std::unique_ptr<Patience> patience_;  // null: never spin
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> heard_{false};
  std::atomic<bool> left_{false};
  bool parts_later_ = false;  // has left from inside an operation; of the thread that holds the lane
  mutable Mutex failure_mutex_;
  Status failure_ GUARDED_BY(failure_mutex_);
  std::shared_ptr<bool> standing_;  // until this rank leaves or fails; see SetUp::Made
  uint64_t monitored_ = 0;          // monitored barriers begun; of rank 0
  std::atomic<std::chrono::milliseconds> doubt_{std::chrono::milliseconds(0)};

  Mutex lease_mutex_;
  Span lease_ GUARDED_BY(lease_mutex_);
  bool lease_in_use_ GUARDED_BY(lease_mutex_) = false;
  size_t lease_wanted_ GUARDED_BY(lease_mutex_) = 0;  // what was asked for when the pool gave lease_
};

/// For the others of the group to read; the first note stays. And what a peer, of a group of so many ranks, wrote
/// there; nothing where it is damaged.
void write_note(kernel::PostedNote& posted, const Failure& failure);
std::optional<Failure> read_note(const kernel::PostedNote& posted, int ranks);
/// "1.50 s", since an operation began.
std::string seconds(const Deadline& deadline);
std::string seconds(double span);

}  // namespace nvx
