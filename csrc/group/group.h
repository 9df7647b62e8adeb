#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "group/core/core.h"
#include "group/core/thread_pool.h"
#include "group/device/device_communicator.h"
#include "group/p2p/symmetric.h"
#include "group/p2p/window.h"
#include "group/plan/operation.h"
#include "group/setup/group_options.h"
#include "group/setup/store.h"

namespace nvx {

class Hierarchical;
class IntraHost;
class MonitoredBarrier;

/// The ranks of one process group, from the view of one rank. Owns all parts of the group; they share a Core, which
/// stores the first failure. Collectives go through the lane, one at a time. Messages are independent of them.
class Group : public std::enable_shared_from_this<Group> {
 public:
  /// Connects to the other ranks through the store. Returns when all have mapped each other's memory. Throws Error.
  Group(Store& store, const GroupOptions& options);
  ~Group();

  int rank() const { return core_->members.rank; }
  int size() const { return core_->members.size(); }
  const std::string& name() const { return core_->members.name; }
  const Topology& topology() const { return core_->members.topology; }
  const PlanFacts& plan_facts() const { return core_->members.facts; }
  /// The state that the parts share, for callers that need more than this class offers.
  Core& core() { return *core_; }

  // --- operations

  /// Runs a collective on the caller's thread: at once if the lane is free, otherwise after the queued ones. Refuses a
  /// call from inside another operation of this group, for example by a signal handler that runs during its wait.
  Status execute(Operation& operation);
  /// The status of such a refusal, for other calls that would wait for the operation inside which they are made.
  Status reentrant() const { return core_->diagnosis.reentrant(); }
  /// Runs a collective on this thread, which holds the lane.
  Status run(Operation& operation, Runner runner);
  Lane& lane();
  /// Rank 0 waits for all, then releases them. Its error names the first missing rank, or all. The group stays usable.
  Status monitored_barrier(std::chrono::milliseconds timeout, bool name_all);
  Mailbox& mailbox() { return *mailbox_; }
  std::shared_ptr<Window> open_window(const std::optional<Window::Memory>& mine);
  /// See `Symmetric::rendezvous()`. `opened`: for a block in a GPU's pool, the open device of a group of the same
  /// ranks; null for host memory.
  std::shared_ptr<Symmetric> rendezvous_symmetric(const SymmetricBlock& mine, std::byte* base,
                                                  const DeviceCommunicator* opened);

  /// Numbers an operation when it is issued, in the order of the program.
  uint64_t next_number() { return core_->next_number(); }
  uint64_t sequence() const { return core_->sequence.load(std::memory_order_relaxed); }

  void set_timeout(std::chrono::milliseconds timeout) { core_->waits.set_timeout(timeout); }
  std::chrono::milliseconds timeout() const { return core_->waits.timeout(); }
  /// How long an operation with this timeout of its own (0: none) may wait. 0: without limit.
  std::chrono::milliseconds span_of(std::chrono::milliseconds own) const { return core_->waits.span_of(own); }

  // --- operations of devices

  DeviceCommunicator& device() { return *device_; }
  /// For an operation with a proxy: allocates the proxy's memory for it. Call before the operation has a number.
  Status reserve_slots(const Operation& operation);
  /// Begins the operation's part on the device, at the call. A failure fails the group.
  Status launch(const Operation& operation, Begins begins = Begins::kNow);

  // --- the end

  /// The ranks' processes, for the set-up of a later group.
  std::vector<EarlierProcess> processes();
  /// Ends the operations in flight here, and refuses later calls. Waits for no peer. Any thread may call it any time.
  void abort(const std::string& why) { (void)core_->failures.fail(core_->diagnosis.aborted(why)); }
  /// Notifies peers that still wait for this rank that it leaves; waits for no peer. Idempotent. Inside an operation of
  /// this group it refuses later calls and ends the operation; the rank leaves when the operation has ended.
  void leave();

  // The failure of the group; see `FailureState`.
  bool failed() const { return core_->failures.failed(); }
  bool closed() const { return core_->failures.closed(); }
  Status failure() const { return core_->failures.failure(); }
  Status check_alive(const char* what = "this call") const { return core_->failures.check_alive(what); }
  Status fail(Failure failure) { return core_->failures.fail(std::move(failure)); }
  Status fail_begun(const Status& status) { return core_->failures.fail_begun(status); }
  Status check_peers() { return core_->failures.check_peers(); }
  bool check_interrupt() { return core_->failures.check_interrupt(); }
  void note_failure_seen() { core_->failure_seen.store(true, std::memory_order_relaxed); }
  bool failure_seen() const { return core_->failure_seen.load(std::memory_order_relaxed); }

 private:
  Status carry_out(Operation& operation, Runner runner);
  void tear_down();
  void finalize();

  std::unique_ptr<Core> core_;
  std::shared_ptr<Lane> lane_;
  std::unique_ptr<DeviceCommunicator> device_;
  std::unique_ptr<IntraHost> intra_host_;
  std::unique_ptr<Hierarchical> hierarchical_;  // null if all ranks are on one host
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<MonitoredBarrier> monitored_;
  bool finalizes_later_ = false;  // this rank left from inside an operation; owned by the holder of the lane
};

}  // namespace nvx
