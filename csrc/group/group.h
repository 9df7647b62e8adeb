#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/mutex.h"
#include "group/engine.h"
#include "group/operation.h"
#include "group/plan.h"
#include "group/store.h"
#include "group/topology.h"
#include "kernel/channel.h"
#include "memory/neighbours.h"

namespace nvx {

class Mailbox;

struct GroupOptions {
  std::string name;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};  ///< of an operation, and of set-up; 0: none
  std::vector<uint64_t> global_ranks;    ///< of the ranks, if known: whom to look after during set-up
  uint32_t first_epoch = 0;              ///< where the counters begin; tests begin near their wrap
};

/// The ranks of one process group, seen from one of them. Owns all that the group has: its pad, its staging, its order
/// of operations, its mail. Collectives go through the lane, one at a time; mail goes apart from them. The first
/// failure stays.
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
  const Topology& topology() const { return topology_; }
  const PlanFacts& plan_facts() const { return facts_; }

  /// Runs a collective on the caller's thread at once if the lane is free, and behind what is queued otherwise.
  Status execute(Operation& operation);
  /// Runs a collective on this thread, which holds the lane.
  Status run(Operation& operation, Carrier carrier);
  Lane& lane() { return *lane_; }
  Mailbox& mail() { return *mailbox_; }

  /// Rank 0 waits for all and tells them; the error there names who is missing, the first one or all of them. The group
  /// stays usable.
  Status monitored_barrier(std::chrono::milliseconds timeout, bool name_all);

  /// Counts an operation when it is issued, in the order of the program.
  uint64_t next_number() { return sequence_.fetch_add(1, std::memory_order_relaxed) + 1; }
  /// Collectives issued so far.
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

  /// Ends what is in flight here, and refuses what comes. Local, does not wait for anybody, may be called at any time.
  void abort(const std::string& why);
  /// Says goodbye: peers that still wait for this rank are told. Does not wait for them. Idempotent.
  void leave();

  /// Whether this rank has left.
  bool closed() const { return left_.load(std::memory_order_acquire); }
  /// Fails the group if this is the main thread and the user wants it to stop.
  bool look_for_interrupt();
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status failure() const;
  /// Stores the first failure and tells the peers; returns the one that is stored.
  Status fail(Code code, const std::string& cause, const std::string& context);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count(), std::memory_order_relaxed); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  /// How an operation with this timeout of its own waits.
  WaitRules rules(std::chrono::milliseconds own, Carrier carrier);

  bool alarmed(int peer) override;
  void alarm(int peer) override;
  Span yield() override;

  /// The status for a wait on a peer that ended badly. waited_for: ", and for ranks 2, 3" or so.
  Status explain_wait(Waited how, int peer, const std::string& what, const std::string& missing,
                      const Deadline& deadline);

  kernel::Pad pad(int rank) const { return {memory_[size_t(rank)].pad, memory_.size()}; }
  const kernel::PeerMemory& memory(int rank) const { return memory_[size_t(rank)]; }
  Neighbours& neighbours() { return *neighbours_; }
  /// Holds when no peer can touch any more what this group exported.
  std::function<bool()> everybody_gone() const;

 private:
  void meet(Store& store);
  std::vector<Hello> exchange_hellos(Store& store, const std::string& door, const Deadline& deadline);
  std::vector<uint8_t> fetch(Store& store, const std::string& key, const Deadline& deadline);
  void map_peers(Doorway& door, const Deadline& deadline);
  void await_ready(Doorway& door, const Deadline& deadline);
  Status check_alive() const;

  size_t staged_bytes(const Operation& operation) const;
  void hold_lease(size_t bytes);
  void rest_lease();
  Status explain_verdict(const kernel::Verdict& verdict, const Operation& operation, const Deadline& deadline);
  std::string missing_ranks();
  bool read_by_all(uint32_t epoch) const;
  bool gone(int peer) const;
  bool dead(int peer) const { return peers_[size_t(peer)] && peers_[size_t(peer)]->dead(); }
  int told_by() const;

  GroupOptions options_;
  uint32_t fork_generation_;
  std::shared_ptr<Neighbours> neighbours_;
  Span pad_span_;
  Topology topology_;
  PlanFacts facts_;
  uint64_t id_ = 0;
  std::vector<std::shared_ptr<Neighbour>> peers_;  // null for ranks of this process
  std::vector<kernel::PeerMemory> memory_;
  std::unique_ptr<kernel::Channel> channel_;
  std::shared_ptr<Lane> lane_;
  std::unique_ptr<Mailbox> mailbox_;

  std::unique_ptr<Patience> patience_;  // null: never spin
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> left_{false};
  mutable Mutex failure_mutex_;
  Status failure_ GUARDED_BY(failure_mutex_);
  std::shared_ptr<bool> standing_ =
      std::make_shared<bool>(true);  // until this rank leaves or fails; see Neighbours::meet
  uint64_t monitored_ = 0;           // monitored barriers begun

  Mutex lease_mutex_;
  Span lease_ GUARDED_BY(lease_mutex_);
  bool lease_in_use_ GUARDED_BY(lease_mutex_) = false;
  size_t lease_wanted_ GUARDED_BY(lease_mutex_) = 0;  // what was asked for when the pool gave lease_
};

}  // namespace nvx
