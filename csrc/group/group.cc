#include "group/group.h"

#include <new>

#include "base/interrupt.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/thread_state.h"
#include "group/core/intra_host.h"
#include "group/hierarchy/hierarchical.h"
#include "group/monitored_barrier.h"
#include "group/setup/setup.h"
#include "kernel/reduce/level.h"

namespace nvx {

namespace {

/// A queued synchronous call: the caller waits for it in the lane.
class QueuedCall final : public Task {
 public:
  QueuedCall(Group& group, Operation& operation) : group_(group), operation_(operation) {}
  void perform(Runner runner) override { status_ = group_.run(operation_, runner); }
  const Status& status() const { return status_; }

 private:
  Group& group_;
  Operation& operation_;
  Status status_;
};

/// Ends the caller's turn on the lane, also after an exception: other calls would wait for ever.
struct InlineTurn {
  ~InlineTurn() { lane.end_inline(); }
  Lane& lane;
};

}  // namespace

/// In a forked child, a lane that the parent's threads hold is never released. There another one refuses operations.
Lane& Group::lane() {
  if (!core_->failures.forked()) return *lane_;
  static const auto refusals = std::make_shared<Lane>();
  return *refusals;
}

Status Group::execute(Operation& operation) {
  if (core_->failures.forked()) return check_alive();
  if (lane_->begin_inline()) {
    if (operation.number == 0) operation.number = next_number();
    const InlineTurn turn{*lane_};
    return run(operation, Runner::kCaller);
  }
  if (lane_->held_here()) return reentrant();
  if (operation.number == 0) operation.number = next_number();
  const auto call = std::make_shared<QueuedCall>(*this, operation);
  lane_->submit(call);
  lane_->wait(*call, Lane::MayRun::kYes, [this] { return check_interrupt(), false; });
  return call->status();
}

Status Group::run(Operation& o, Runner runner) {
  Status status = carry_out(o, runner);
  if (finalizes_later_) finalize();
  return status;
}

Status Group::carry_out(Operation& o, Runner runner) {
  FailureState& failures = core_->failures;
  if (failures.failed()) return failures.check_alive(describe(o.fingerprint()).c_str());
  NVX_TRY(failures.check_alive());
  if (o.number == 0) o.number = next_number();
  if (failures.check_reports())
    return failures.failed_before(describe(o.fingerprint()) + " #" + std::to_string(o.number));
  if (reduces(o.collective) && !kernel::level().reduce(o.dtype, o.op)) {
    return {Code::kInvalid, std::string("nvx: ") + nvx::name(o.op) + " is not defined for " + nvx::name(o.dtype)};
  }
  try {
    WaitRules rules = core_->waits.rules_of(o, runner);
    rules.traced = core_->status->traced();
    const CallStatus call(*core_->status, o, o.whole ? Clock::now() : rules.deadline.start);
    const DefaultFloatMode mode;
    // Ranks stage in chunks of their own sizes. So a chunk may arrive where this rank has not staged its input yet.
    std::vector<std::byte> copy;
    if (o.collective == kernel::Collective::kAllToAll && !hierarchical_ && o.send.total() > kernel::kSlotBytes)
      send_copy_if_overlapping(o, copy);
    return hierarchical_ ? hierarchical_->run(o, rules) : intra_host_->run(o, o, rules);
  } catch (const std::bad_alloc&) {
    return failures.fail(core_->diagnosis.no_memory(describe(o.fingerprint())));
  } catch (const std::exception& error) {  // the caller gives the lane back
    return failures.fail(system_failure("carrying an operation out failed", error));
  }
}

Status Group::reserve_slots(const Operation& o) {
  NVX_TRY(check_alive());
  return hierarchical_->reserve_slots(o);
}

Status Group::launch(const Operation& o, Begins begins) {
  NVX_TRY(check_alive());
  const Status status = hierarchical_->launch(o);
  if (status.ok() || begins == Begins::kInReplays) return status;
  return fail_begun(status);  // peers wait for the operation that did not begin here
}

Status Group::monitored_barrier(std::chrono::milliseconds timeout, bool name_all) {
  return monitored_->run(timeout, name_all);
}

std::shared_ptr<Window> Group::open_window(const std::optional<Window::Memory>& mine) {
  return Window::open({*core_, *mailbox_, [this](Operation& operation) { return execute(operation); }}, mine);
}

std::shared_ptr<Symmetric> Group::rendezvous_symmetric(const SymmetricBlock& mine, std::byte* base,
                                                       const DeviceCommunicator* opened) {
  NVX_CHECK(!core_->failures.forked(), "a forked child process cannot use its parent's groups");
  Symmetric::Parts parts{*core_, [this](Operation& operation) { return execute(operation); }, nullptr};
  if (opened) parts.pool_of = [opened](int local_rank) { return opened->peer_pool(local_rank); };
  return Symmetric::rendezvous(parts, mine, base);
}

// --- creation and end

namespace {

void log_description(const Members& members) {
  if (members.rank != 0) return;
  const Topology& topology = members.topology;
  const bool one_host = topology.hosts.size() == 1 && topology.ranks.size() > 1;
  const char* const way = one_host ? " through shared memory" : "";
  NVX_LOG(kInfo, "group %s: %s%s; %zu cores, L3 %zu KiB; copy and reduce loops: %s", members.name.c_str(),
          topology.describe().c_str(), way, members.facts.cores, topology.l3_bytes >> 10, kernel::level().name);
  PlanFacts facts = members.facts;  // whose `ranks` are those of this rank's host
  for (const std::vector<int>& host : topology.hosts) facts.ranks = std::max(facts.ranks, host.size());
  NVX_LOG(kInfo, "group %s: %s", members.name.c_str(), explain(kernel::Collective::kAllReduce, 1 << 20, facts).c_str());
}

}  // namespace

Group::Group(Store& store, const GroupOptions& options) : lane_(std::make_shared<Lane>()) {
  auto status = std::make_unique<GroupStatus>(options.name, options.rank, options.size);
  SetUp set_up(store, options);
  core_ = std::make_unique<Core>(options, std::move(status), set_up.run(), [this] { return weak_from_this(); });
  net::GroupPort* const port = core_->port.get();
  try {
    device_ = std::make_unique<DeviceCommunicator>(*core_);
    core_->failures.on_failure([this](const Status& why) { device_->abort(why); });
    intra_host_ = std::make_unique<IntraHost>(*core_);
    if (port) hierarchical_ = std::make_unique<Hierarchical>(*core_, *intra_host_);
    mailbox_ = std::make_unique<Mailbox>(*core_);
    monitored_ = std::make_unique<MonitoredBarrier>(*core_);
    if (port) {
      MutexLock lock(port->mutex());
      port->on_failure([this](const net::GroupPort::ReportedFailure& report) { core_->failures.pass_on(report); });
    }
    log_description(core_->members);
    core_->status->open(core_->members.id, core_->members.global_rank(options.rank));
    LiveObjects<FailureState>::instance().add(core_->failures);  // last: other threads may use the group from here on
  } catch (const std::exception& error) {
    tear_down();
    set_up.give_up({core_->members, std::move(core_->port), nullptr}, failure_of(error));
    throw;
  }
}

/// On return, no other thread calls the incomplete group.
void Group::tear_down() {
  core_->failures.forget_peers();
  if (net::GroupPort* const port = core_->port.get()) {
    MutexLock lock(port->mutex());
    port->p2p().on_change([] {});
    port->on_failure([](const net::GroupPort::ReportedFailure&) {});
  }
  mailbox_.reset();
  hierarchical_.reset();
  intra_host_.reset();
}

Group::~Group() {
  if (core_->failures.forked()) {
    // The parent owns everything: memory is not mapped here, absent threads may hold locks. So nothing is destroyed.
    new auto(std::move(lane_));
    (void)mailbox_.release();
    (void)hierarchical_.release();
    (void)intra_host_.release();
    device_->leave_to_parent();
    (void)core_.release();
    return;
  }
  const Uninterrupted here;
  LiveObjects<FailureState>::instance().remove(core_->failures);
  leave();
  if (finalizes_later_) finalize();  // no operation has ended since
  device_->close();
  mailbox_.reset();
  hierarchical_.reset();
  core_->port.reset();
  intra_host_.reset();
  core_->shm().arena().free_when(core_->members.pad_span, core_->members.all_peers_gone());
}

std::vector<EarlierProcess> Group::processes() {
  const Members& members = core_->members;
  std::vector<EarlierProcess> all;
  for (int r = 0; r < size(); ++r) {
    const Hello& hello = topology().ranks[size_t(r)];
    EarlierProcess& process = all.emplace_back(EarlierProcess{.id = hello.arena, .place = place_of(hello)});
    if (const int s = members.local_rank_of(r); s >= 0) {
      process.local = members.peers[size_t(s)];
    } else if (net::GroupPort* const port = core_->port.get()) {
      MutexLock lock(port->mutex());
      process.remote = port->process_of(r);
    }
  }
  return all;
}

/// Peers reuse their memory after this rank has left, so the operations in flight end first, within a watch interval.
void Group::leave() {
  if (core_->failures.forked() || !core_->failures.close()) return;
  if (lane_->held_here()) {
    finalizes_later_ = true;
    return;
  }
  constexpr std::chrono::seconds kMost{10};
  lane_->settle(kMost, Lane::Until::kIdle);
  monitored_->settle(kMost);
  finalize();
}

void Group::finalize() {
  finalizes_later_ = false;
  if (!failed()) intra_host_->warn_of_differing_calls();
  core_->status->leave();
  if (const std::string lates = core_->status->lates(); !lates.empty()) {
    NVX_LOG(kInfo, "group %s rank %d waited for: %s", core_->members.name.c_str(), rank(), lates.c_str());
  }
  mailbox_->close();
  device_->announce_leaving();
  if (net::GroupPort* const port = core_->port.get()) {
    MutexLock lock(port->mutex());
    port->leave();
  }
  if (device_->finalize()) {
    core_->failures.announce_left();
  } else {
    (void)core_->failures.fail_as_left(rank());
  }
}

}  // namespace nvx
