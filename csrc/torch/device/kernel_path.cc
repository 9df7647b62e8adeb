#include "torch/device/kernel_path.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "base/contain.h"
#include "base/error.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/call/call.h"
#include "torch/core/argument_error.h"
#include "torch/core/interrupt.h"
#include "torch/core/store.h"
#include "torch/device/delegate.h"
#include "torch/device/launched_work.h"

namespace nvx {

bool may_use_kernels(Group& group) { return group.core().members.kernels != Kernels::kNever; }

void refuse_other_device(const Group& group, at::Device served, at::Device device) {
  throw_argument_error("nvx: group " + group.name() + " uses nvx's kernels on device " +
                       std::to_string(served.index()) + " of this rank, and this tensor is on " + device.str() +
                       ". Next: keep the tensors of a group on one device of each rank");
}

KernelPath::KernelPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store)
    : group_(std::move(group)), store_(std::move(store)) {}

KernelPath::~KernelPath() = default;

bool KernelPath::agree_to_serve(at::Device device) {
  if (device.type() != kernel_device() || !may_use_kernels(*group_)) return false;
  const bool yes = served_.agree(device, [&] { return open(device); });
  if (yes && device != served_.device()) refuse_other_device(*group_, served_.device(), device);
  return yes;
}

bool KernelPath::may_serve(c10::DeviceIndex device) const {
  if (!served_.is_decided())
    return kernel::built_with_cuda() && may_use_kernels(*group_) && group_->topology().hosts.size() == 1;
  return served_.is_yes() && device == served_.device().index();
}

bool KernelPath::open(at::Device device) {
  refuse_to_open(*group_, device);
  TorchStore ranks = store_beside(*group_, store_);
  if (!group_->device().reaches_all(ranks, device.index())) {
    if (const Status alive = group_->check_alive(); !alive.ok()) raise(alive);
    return false;
  }
  shared_ = SharedStreams::join(group_->core().members.id);  // before any rank can make its next call
  return open_device(*group_, store_, device, order_);
}

TorchStore store_beside(const Group& group, c10::intrusive_ptr<c10d::Store> store) {
  return {std::move(store), group.size(), group.timeout(), [&group] {
            if (const Status alive = group.check_alive(); !alive.ok()) throw Error(alive);
            return false;
          }};
}

bool open_device(Group& group, const c10::intrusive_ptr<c10d::Store>& store, at::Device device,
                 const std::shared_ptr<TorchStreamOrder>& order) {
  const RelaxedCaptureGuard relaxed;
  const c10::OptionalDeviceGuard on(device);
  TorchStore ranks = store_beside(group, store);
  const bool yes = group.device().open(ranks, device.index(), order);
  if (yes) (void)order->begin(device);  // if the device fails here, so does the first launch, which notifies the peers
  if (const Status alive = group.check_alive(); !alive.ok()) raise(alive);
  return yes;
}

void refuse_to_open(const Group& group, at::Device device) {
  if (capture_of(CommStreams::of_caller(device).h2d) == 0) return;
  throw_argument_error(
      "nvx: this stream is being captured into a graph, and the first collective of group " + group.name() +
      " with tensors of " + device.str() +
      " initialises nvx on that device, a collective step that cannot be captured. Next: call one collective of "
      "the group, on all ranks, before the capture");
}

SharedStreams::Claim KernelPath::claim_stream(const StagingCopies& staging) const {
  if (!shared_ || staging.capture() != 0) return {};
  const c10::Stream stream = current_stream(staging.stream().device());
  const SharedStreams::Call call{stream, {group_->rank(), group_->sequence() + 1}};
  if (!staging.streams().own) return shared_->claim(call, group_->name());
  shared_->check(call, group_->name());
  return {};
}

void KernelPath::note_wait(const StagingCopies& staging, uint64_t number) const {
  if (!shared_ || staging.capture() != 0) return;
  shared_->note({current_stream(staging.stream().device()), {group_->rank(), number}});
}

IntrusiveWork KernelPath::issue(CallContext& context, Call&& call, Delegate* delegate) {
  auto staging = context.on_device(call);
  if (delegate) {
    follow_hazards(context, call, staging->streams().d2h);
  } else if (context.scopes.is_open()) {
    // Kernels need contiguous tensors. A call that needs copies is not postponed, because its copies belong at its own
    // place in the stream.
    const auto copies = [](const TensorOperation& c) { return !c.copies_in.empty() || !c.copies_out.empty(); };
    const bool copied = std::any_of(call.collectives.begin(), call.collectives.end(), copies);
    if (!copied) return postpone(context, std::move(call), std::move(staging));
  }
  auto closed = c10::make_scope_exit([&] { contain("the end of a call", [&] { staging->close(call.used()); }); });
  uint64_t ended_at = 0;
  Status status = launch(call.collectives, *staging, delegate, &ended_at);
  closed.release();
  const bool async = call.mode == Mode::kAsync, needs_work = context.needs_work();
  contain_and(
      [&] {
        const Tensors used = async ? call.used() : Tensors();
        if (async || needs_work) staging->close(used);
        if (async && delegate) context.hazards.expect(used)->set_out(staging->stream());
      },
      [&](const std::exception* error) {
        const Status lost = lose(call.collectives, *staging, error);
        if (status.ok()) status = lost;
      });
  context.raise_if_failed(status);
  if (!async && !needs_work) return nullptr;
  if (!async) return CallContext::done(context.facts(call.kind), call.outputs, std::move(staging));
  auto work = c10::make_intrusive<LaunchedWork>(shared_from_this(), context.facts(call.kind), call, std::move(staging));
  work->begin(ended_at);
  context.scopes.add(work);
  return work;
}

c10::intrusive_ptr<NvxWork> KernelPath::begin_delegated(CallContext& context, const DelegatedMessages& batch,
                                                        Delegate& delegate, PendingSends& earlier) {
  const bool receives = batch.front().receives;
  Kind kind{receives ? c10d::OpType::RECV : c10d::OpType::SEND, receives ? "nvx:recv" : "nvx:send"};
  if (batch.size() > 1) kind = {c10d::OpType::COALESCED, "nvx:batch_isend_irecv"};
  Tensors sent, received;
  for (const DelegatedMessage& p : batch) (p.receives ? received : sent).push_back(p.tensor);
  const Call call{kind, /*collectives=*/{}, received, sent, Mode::kAsync};
  const at::Device device = batch.front().tensor.device();
  auto staging = std::make_unique<StagingCopies>(context.streams.of_kernels(device, /*capture=*/0),
                                                 /*timed=*/context.listeners.timed);
  follow_hazards(context, call, staging->stream());
  Tensors used = sent;
  used.insert(used.end(), received.begin(), received.end());
  Status status = launch(batch, *staging, delegate, earlier);
  group_->mailbox().push(Runner::kPool);
  try {
    staging->close(used);
    context.hazards.expect(used)->set_out(staging->stream());
  } catch (const std::exception& error) {
    status = fail_on_device(*group_, device, kind.title + 4, &error);
  }
  context.raise_if_failed(status);
  auto work = c10::make_intrusive<LaunchedWork>(shared_from_this(), context.facts(kind), call, std::move(staging));
  work->begin(/*ended_at=*/0);
  return work;
}

Status KernelPath::launch(const DelegatedMessages& batch, StagingCopies& staging, Delegate& delegate,
                          PendingSends& earlier) {
  Works before;
  const auto later = c10::make_scope_exit([&] { report(before); });  // runs after the lock is released
  MutexLock lock(mutex_);
  before = begin_postponed();
  staging.copy_in_on_device({});
  try {
    const c10::StreamGuard on(staging.stream());
    staging.start_clock();
    const LaunchStream stream = launch_stream(staging.stream(), /*capture=*/0);
    return order_->launch_on(stream, [&] { return delegate.begin(batch, earlier, staging.stream()); });
  } catch (const std::exception& error) {
    return fail_on_device(*group_, staging.stream().device(), "send_recv", &error);
  }
}

IntrusiveWork KernelPath::postpone(CallContext& context, Call&& call, std::unique_ptr<StagingCopies> staging) {
  SharedStreams::Claim claim = claim_stream(*staging);
  staging->copy_in_on_device({});  // may throw; then no number has been assigned
  claim.keep();
  number(call.collectives);
  auto work = c10::make_intrusive<LaunchedWork>(shared_from_this(), context.facts(call.kind), call, std::move(staging));
  work->used_ = call.used();
  work->collectives_ = call.take_collectives();
  work->closed_.store(false, std::memory_order_release);
  context.scopes.add(work);
  postpone(work);
  return work;
}

void KernelPath::number(std::span<TensorOperation> collectives) {
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
  }
}

Status KernelPath::launch(std::span<TensorOperation> collectives, StagingCopies& staging, Delegate* delegate,
                          uint64_t* ended_at) {
  Works before;
  const auto later = c10::make_scope_exit([&] { report(before); });  // runs after the lock is released
  MutexLock lock(mutex_);
  before = begin_postponed();
  prepare(collectives, staging);
  try {
    const c10::StreamGuard on(staging.stream());
    staging.start_clock();
    const LaunchStream stream = launch_stream(staging.stream(), staging.capture());
    if (delegate) {
      NVX_TRY(order_->launch_on(stream, [&] { return delegate->begin(collectives.front(), staging.stream()); }));
    } else {
      Operations operations;
      for (const TensorOperation& c : collectives) operations.push_back(&c.operation);
      NVX_TRY(group_->device().launch({operations.data(), operations.size()}, stream));
      if (stream.capture == 0) *ended_at = group_->device().launched();  // exact: the lock excludes other launches
    }
    staging.copy_out(loads_of(collectives, &TensorOperation::copies_out));
    return {};
  } catch (const std::exception& error) {
    return lose(collectives, staging, &error);
  }
}

void KernelPath::prepare(std::span<TensorOperation> collectives, StagingCopies& staging) {
  SharedStreams::Claim claim = claim_stream(staging);
  staging.copy_in_on_device(loads_of(collectives, &TensorOperation::copies_in));
  claim.keep();
  number(collectives);
}

Status KernelPath::lose(std::span<const TensorOperation> collectives, const StagingCopies& staging,
                        const std::exception* error) {
  return fail_on_device(*group_, staging.stream().device(), nvx::name(collectives.front().operation.collective), error);
}

void KernelPath::postpone(c10::intrusive_ptr<LaunchedWork> work) {
  const auto alike = [](const LaunchedWork& a, const LaunchedWork& b) {
    return a.staging_->stream() == b.staging_->stream() && a.staging_->capture() == b.staging_->capture() &&
           a.collectives_.front().operation.timeout == b.collectives_.front().operation.timeout;
  };
  const auto count = [](const Works& works) {
    size_t n = 0;
    for (const auto& w : works) n += w->collectives_.size();
    return n;
  };
  Works begun;
  const auto later = c10::make_scope_exit([&] { report(begun); });  // runs after the lock is released
  MutexLock lock(mutex_);
  if (!postponed_.empty() && !alike(*postponed_.front(), *work)) begun = begin_postponed();
  postponed_.push_back(std::move(work));
  has_postponed_.store(true, std::memory_order_release);
  if (count(postponed_) >= kernel::kLaunchJobs) {
    const Works full = begin_postponed();
    begun.insert(begun.end(), full.begin(), full.end());
  }
}

void KernelPath::flush_postponed() {
  MutexLock lock(mutex_);
  const Works begun = begin_postponed();
  lock.unlock();
  report(begun);
}

void KernelPath::follow_hazards(CallContext& context, const Call& call, const c10::Stream& stream) {
  constexpr std::chrono::milliseconds kPollSlice{20};
  for (const Tensors* tensors : {&call.inputs, &call.outputs}) {
    while (!context.hazards.follow(*tensors, stream)) {
      Group& of_devices = *context.groups.of_devices();
      if (of_devices.lane().held_here()) raise(group_->reentrant());
      flush_postponed();
      of_devices.lane().settle(kPollSlice);
      group_->check_interrupt();
      raise_interrupt();
      if (const Status alive = of_devices.check_alive(); !alive.ok()) raise(alive);
    }
  }
}

KernelPath::Works KernelPath::begin_postponed() {
  Works works = std::exchange(postponed_, {});
  has_postponed_.store(false, std::memory_order_release);
  if (works.empty()) return works;
  const StagingCopies& first = *works.front()->staging_;
  Operations operations;
  for (const auto& work : works) {
    for (const TensorOperation& c : work->collectives_) operations.push_back(&c.operation);
  }
  Status outcome;
  uint64_t ended_at = group_->device().launched();
  try {
    if (first.capture() != 0 && capture_of(first.stream()) != first.capture()) {
      outcome = Status(Code::kInvalid,
                       "nvx: the capture in which this operation was called has ended before its coalescing scope",
                       "end the coalescing scope, or wait for the operation, inside the capture");
    } else {
      for (const auto& work : works) work->staging_->start_clock();
      const c10::StreamGuard on(first.stream());
      outcome = group_->device().launch({operations.data(), operations.size()},
                                        launch_stream(first.stream(), first.capture()));
    }
  } catch (const std::exception& error) {  // part of the launch may have begun
    outcome = group_->fail(system_failure("launching kernels failed", error));
  }
  for (const auto& work : works) {
    ended_at += work->collectives_.size();
    work->close(outcome, first.capture() == 0 ? ended_at : 0);
  }
  return works;
}

void KernelPath::report(const Works& begun) {
  for (const auto& work : begun) work->report_outcome();
}

}  // namespace nvx
