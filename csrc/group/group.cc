#include "group/group.h"

#include <new>

#include "group/core/intra_host.h"
#include "group/hierarchy/hierarchical.h"
#include "group/monitored.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

/// A queued synchronous call: the caller waits for it in the lane.
class QueuedCall final : public Task {
 public:
  QueuedCall(Group& group, Operation& operation) : group_(group), operation_(operation) {}
  void perform(Carrier carrier) override { status_ = group_.run(operation_, carrier); }
  const Status& status() const { return status_; }

 private:
  Group& group_;
  Operation& operation_;
  Status status_;
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
    Status status = run(operation, Carrier::kCaller);
    lane_->end_inline();
    return status;
  }
  if (lane_->held_here()) return inside_itself();
  if (operation.number == 0) operation.number = next_number();
  const auto call = std::make_shared<QueuedCall>(*this, operation);
  lane_->submit(call);
  lane_->wait(*call, Lane::MayRun::kYes, [this] { return look_for_interrupt(), false; });
  return call->status();
}

Status Group::run(Operation& o, Carrier carrier) {
  Status status = carry_out(o, carrier);
  if (finalizes_later_) finalize();
  return status;
}

Status Group::carry_out(Operation& o, Carrier carrier) {
  FailureState& failures = core_->failures;
  if (failures.failed()) return failures.check_alive(describe(o.fingerprint()).c_str());
  NVX_TRY(failures.check_alive());
  if (o.number == 0) o.number = next_number();
  if (failures.told()) return failures.came_late(describe(o.fingerprint()) + " #" + std::to_string(o.number));
  if (reduces(o.collective) && !kernel::level().reduce(o.dtype, o.op)) {
    return {Code::kInvalid, std::string("nvx: ") + nvx::name(o.op) + " is not defined for " + nvx::name(o.dtype)};
  }
  try {
    WaitRules rules = core_->waits.rules_of(o, carrier);
    rules.traced = core_->status->traced();
    const CallStatus call(*core_->status, o, o.whole ? Clock::now() : rules.deadline.start);
    return hierarchical_ ? hierarchical_->run(o, rules) : intra_host_->run(o, o, rules);
  } catch (const std::bad_alloc&) {
    return failures.fail(core_->diagnosis.no_memory(describe(o.fingerprint())));
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

std::shared_ptr<Symmetric> Group::meet_symmetric(const SymmetricBlock& mine, std::byte* base,
                                                 const DeviceCommunicator* opened) {
  NVX_CHECK(!core_->failures.forked(), "a forked child process cannot use its parent's groups");
  Symmetric::Parts parts{*core_, [this](Operation& operation) { return execute(operation); }, nullptr};
  if (opened) parts.pool_of = [opened](int local_rank) { return opened->peer_pool(local_rank); };
  return Symmetric::meet(parts, mine, base);
}

}  // namespace nvx
