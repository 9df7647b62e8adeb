#include "torch/device/host_proxy_path.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include "base/contain.h"
#include "base/hash.h"
#include "group/hierarchy/stream_host_proxy.h"
#include "kernel/gpu/capture.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/core/interrupt.h"
#include "torch/device/launched_work.h"

namespace nvx {

bool HostProxyPath::agree_to_serve(const Operation& operation, at::Device device) {
  return can_be_proxied(operation.collective, operation.dtype, operation.count, context_.group().plan_facts()) &&
         agree_to_serve(device);
}

bool HostProxyPath::agree_to_serve(at::Device device) {
  Group& group = context_.group();
  if (device.type() != kernel_device() || !may_use_kernels(group) || group.topology().hosts.size() == 1) return false;
  const bool yes = served_.agree(device, [&] {
    refuse_to_open(group, device);
    Group& of_devices = *context_.groups.of_devices();
    return open_device(of_devices, context_.groups.store_of_devices(), device, order_);
  });
  if (yes && device != served_.device()) refuse_other_device(group, served_.device(), device);
  return yes;
}

IntrusiveWork HostProxyPath::issue(Call&& call) {
  const std::shared_ptr<Group>& group = context_.groups.of(call.collectives);
  const uint64_t capture = capture_of(current_stream(call.device()));
  auto staging = std::make_unique<StagingCopies>(context_.streams.of_proxies(call.device(), capture),
                                                 context_.listeners.timed && capture == 0);
  if (capture == 0) kernels_->follow_hazards(context_, call, staging->stream());
  if (holder_.is_this_thread()) raise(group->reentrant());
  Status status;
  uint64_t ended_at = 0;
  {
    MutexLock lock(mutex_);
    const auto held = holder_.hold();
    status = begin(call, group, *staging);
    if (!status.ok()) group->note_failure_seen();
    if (capture == 0) ended_at = group->device().launched();
  }
  context_.raise_if_failed(status);
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, context_.facts(call.kind, group), call, std::move(staging));
  work->begin(ended_at);
  context_.scopes.add(work);
  if (call.mode == Mode::kSync) work->wait(std::chrono::milliseconds(0));
  return work;
}

Status HostProxyPath::begin(Call& call, const std::shared_ptr<Group>& group, StagingCopies& staging) {
  const at::Device device = call.device();
  const Tensors used = call.used();
  const Op op = prepare(call.take_collectives(), group, staging);
  Status status;
  contain_and(
      [&] {
        mutex_.held_by_caller();
        status = launch(op, *group, staging);
        staging.close(used);
        if (staging.capture() == 0) context_.hazards.expect(used)->set_out(staging.stream());
        if (status.ok()) op->queue_once();
      },
      [&](const std::exception* error) {  // part of the call may have begun
        contain("the end of a call", [&] { staging.close(used); });
        status = fail_on_device(*group, device, call.kind.title + 4, error);
      });
  return status;
}

/// An exception here does not affect the other ranks: they do not wait for an operation without a number.
HostProxyPath::Op HostProxyPath::prepare(TensorOperations&& collectives, const std::shared_ptr<Group>& group,
                                         StagingCopies& staging) {
  auto op = std::make_shared<ProxyOp>(group, std::move(collectives));
  if (staging.capture() == 0) op->expect(context_.counts, context_.listeners.of_failures(context_.muted));
  for (TensorOperation& c : op->collectives) {
    c.operation.shape = Hash().add(c.operation.shape).add("proxied").value();  // all ranks proxy it, or get an error
    c.operation.timeout = group->span_of(c.operation.timeout);
    c.proxy = make(*group, *op, c.operation.collective, staging);
    c.operation.proxy = c.proxy.get();
    if (const Status status = group->reserve_slots(c.operation); !status.ok()) {
      group->note_failure_seen();
      raise(status);
    }
  }
  staging.copy_in_on_device(loads_of(op->collectives, &TensorOperation::copies_in));
  context_.number(op->collectives);
  return op;
}

std::unique_ptr<HostProxy> HostProxyPath::make(Group& group, ProxyOp& op, kernel::Collective collective,
                                               const StagingCopies& staging) {
  const auto pinned = [](size_t bytes) {
    at::Tensor memory = pinned_memory({int64_t(bytes)});
    auto* const data = static_cast<std::byte*>(memory.data_ptr());
    return std::shared_ptr<std::byte>(data, [memory = std::move(memory)](std::byte*) {});
  };
  std::function<std::shared_ptr<std::byte>(size_t)> on_device;
  if (group.device().why_no_rdma().empty())
    on_device = [&group](size_t bytes) { return group.device().allocate_for_rdma(bytes); };
  return std::make_unique<StreamHostProxy>(
      group.core(), group.device(),
      StreamHostProxy::Setting{collective, order_, launch_stream(staging.stream(), staging.capture()),
                               staging.stream().device().str(), pinned, on_device, [&op] { return op.queue_early(); }});
}

Status HostProxyPath::launch(const Op& op, Group& group, StagingCopies& staging) {
  const bool captured = staging.capture() != 0;
  // The caller keeps the tensors until the allocator knows their streams, and StagingCopies keeps those of a capture.
  // The last thread to drop one calls the driver, and the thread of the host's part must not: the driver may wait for a
  // launch that waits for that part.
  const auto forget = c10::make_scope_exit([&] {
    for (TensorOperation& c : op->collectives) {
      c.copies_in.clear(), c.copies_out.clear(), c.stand_ins.clear();
      if (captured) c.claim.reset();
    }
  });
  staging.start_clock();
  // If graphs may be replayed at any time, the host must work in the order in which the device reaches the operations.
  if (captured || order_->has_graphs()) {
    const Status left = leave_to_stream(op, staging);
    if (!left.ok()) return captured ? left : group.fail_begun(left);
  }
  {
    const RelaxedCaptureGuard relaxed;
    const c10::OptionalDeviceGuard on(staging.stream().device());
    for (TensorOperation& c : op->collectives)
      NVX_TRY(group.launch(c.operation, captured ? Begins::kInReplays : Begins::kNow));
  }
  staging.copy_out(loads_of(op->collectives, &TensorOperation::copies_out));
  return {};
}

/// Enqueues a host function on the staging's stream, after all earlier work of proxies: it queues the host's part when
/// the device reaches the call, and therefore in the device's order, which includes replays. The operations of a graph
/// are never freed: no event reports that a graph was destroyed.
Status HostProxyPath::leave_to_stream(const Op& op, const StagingCopies& staging) {
  op->leave_to_stream();
  const auto once = [](void* kept) {
    const std::unique_ptr<Op> op(static_cast<Op*>(kept));
    contain("the host's part of an operation", [&] { ProxyOp::queue_from_stream(std::move(*op)); });
  };
  const auto again = [](void* kept) {
    const Op& op = *static_cast<Op*>(kept);
    for (TensorOperation& c : op->collectives) c.proxy->reset();
    contain("the host's part of a replay", [&] { ProxyOp::queue_from_stream(op); });
  };
  auto kept = std::make_unique<Op>(op);
  const RelaxedCaptureGuard relaxed;
  const c10::StreamGuard on(staging.stream());
  const LaunchStream stream = launch_stream(staging.stream(), staging.capture());
  const auto call = stream.capture != 0 ? +again : +once;
  NVX_TRY(order_->launch_on(stream, [&] { return kernel::call_host(stream.native, call, kept.get()); }));
  (void)kept.release();
  return {};
}

/// A synchronous barrier waits for its stream anyway. This reports why proxies do not end: their own timeouts fail
/// them.
void HostProxyPath::await_end(Mode mode, std::chrono::milliseconds most) {
  const Deadline limit = Deadline::after(std::max(most, std::chrono::milliseconds(0)));  // 0: no deadline
  for (const auto& group : context_.groups.all()) {
    if (group == context_.groups.of_cpu()) continue;
    const auto over = [&] { return group->device().is_quiet() || !group->device().check_kernels().ok(); };
    std::optional<Status> own;  // of the barrier's group; empty: not waited for, or timed out
    if (mode == Mode::kSync) own = wait_on_device(context_.group(), over, limit);
    raise_interrupt();
    const Status status = group->device().check_kernels();
    if (!status.ok()) group->note_failure_seen();
    context_.raise_if_failed(status);
    if (own && !own->ok()) raise(*own);
  }
}

/// A caller that has waited for a proxy has not seen it end. `KernelExecutor::finalize` waits for the kernels that need
/// no host, by the same rule.
void HostProxyPath::drain(const Deadline& deadline, std::chrono::milliseconds grace) {
  for (const auto& group : context_.groups.all()) {
    if (group == context_.groups.of_cpu() || group->core().failures.forked()) continue;
    const DeviceCommunicator& device = group->device();
    const auto quiet = [&] { return device.is_quiet(); };
    for (uint64_t rounds = 0;; ++rounds) {
      const uint64_t before = device.finished();
      const Deadline limit{Clock::now(), std::min(deadline.end, Clock::now() + grace)};
      if (wait_on_device(*group, quiet, limit) || deadline.passed(Clock::now()) || device.finished() == before) break;
      if (rounds == 0)
        NVX_LOG(kInfo, "group %s: this rank leaves when the operations in flight between hosts have ended",
                group->name().c_str());
    }
    const Status status = group->device().check_kernels();
    if (status.ok() || status.code() == Code::kAborted || status.code() == Code::kInterrupted) continue;
    if (!group->failure_seen() && !context_.muted->exchange(true))
      log_line("%s: do not use the results of the collectives of group %s on devices", status.reason().c_str(),
               group->name().c_str());
  }
}

}  // namespace nvx
