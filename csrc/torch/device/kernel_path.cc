#include "torch/device/kernel_path.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include "base/contain.h"
#include "base/log.h"
#include "base/reason.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/beside_captures.h"
#include "torch/arguments/argument_error.h"
#include "torch/interrupt.h"
#include "torch/store.h"

namespace nvx {

namespace {

/// Where there are no kernels, all that is launched is a delegate's, and never in a capture: then c10's events are
/// enough.
bool may_have_kernels(const c10::Stream& stream) {
  return kernel::built_with_cuda() && stream.device_type() == kernel_device();
}

}  // namespace

Status StreamLauncher::hold_back(const Target& target) {
  if (may_have_kernels(target.stream)) return tail_.hold_back(target.native, target.capture != 0);
  if (last_) last_->block(target.stream);
  return {};
}

Status StreamLauncher::put_behind(const Target& target) {
  if (may_have_kernels(target.stream)) return tail_.put_behind(target.native, target.capture != 0);
  if (!last_) last_.emplace(target.stream.device_type());
  last_->record(target.stream);
  return {};
}

/// Kernels of a channel must not overlap. So on another stream than the last one they wait for what was begun there,
/// and where there are graphs, they wait for what was replayed last.
Status StreamLauncher::follow(const Target& target) {
  MutexLock lock(mutex_);
  if (target.capture == 0) {
    const bool in_order = !has_graphs_ && (!stream_ || stream_ == target.stream);
    return in_order ? Status() : hold_back(target);
  }
  if (capture_.id != target.capture) {
    NVX_TRY(hold_back(target));
    capture_ = {target.capture, std::nullopt, std::nullopt};
  } else if (capture_.last && capture_.stream != target.stream) {
    capture_.last->block(target.stream);
  }
  return {};
}

Status StreamLauncher::note(const Target& target) {
  MutexLock lock(mutex_);
  if (target.capture == 0) {
    stream_ = target.stream;
    return put_behind(target);
  }
  has_graphs_ = true;
  NVX_TRY(put_behind(target));
  if (!capture_.last) capture_.last.emplace(target.stream.device_type());
  capture_.last->record(target.stream);
  capture_.stream = target.stream;
  return {};
}

bool StreamLauncher::has_graphs() {
  MutexLock lock(mutex_);
  return has_graphs_;
}

bool StreamLauncher::ended() {
  const BesideCaptures beside;
  MutexLock lock(mutex_);
  return tail_.passed();
}

void refuse_other_device(const Group& group, at::Device served, at::Device device) {
  throw_argument_error("nvx: group " + group.name() + " is served by kernels on device " +
                       std::to_string(served.index()) + " of this rank, and this tensor is on " + device.str() +
                       ". Next: keep the tensors of a group on one device of each rank");
}

bool KernelPath::agree_to_serve(at::Device device) {
  if (device.type() != kernel_device()) return false;
  const bool yes = served_.answer(device, [&] { return open(device); });
  if (yes && device != served_.device()) refuse_other_device(*group_, served_.device(), device);
  return yes;
}

bool KernelPath::may_serve(c10::DeviceIndex device) const {
  if (!served_.is_answered()) return kernel::built_with_cuda() && group_->topology().hosts.size() == 1;
  return served_.says_yes() && device == served_.device().index();
}

bool KernelPath::open(at::Device device) {
  refuse_to_open(*group_, device);
  if (group_->topology().hosts.size() > 1) {
    NVX_LOG(kInfo, "group %s: collectives of %s are not by kernels alone: the ranks are on several hosts",
            group_->name().c_str(), device.str().c_str());
    return false;
  }
  const BesideCaptures beside;
  const c10::OptionalDeviceGuard on(device);
  shared_ = SharedStreams::join(group_->id());  // before any rank can make its next call
  TorchStore store(store_, group_->size());
  const bool yes = group_->device().open(store, device.index(), launcher_);
  if (const Status alive = group_->check_alive(); !alive.ok()) raise(alive);
  return yes;
}

void refuse_to_open(const Group& group, at::Device device) {
  if (capture_of(CommStreams::of_caller(device).up) == 0) return;
  throw_argument_error("nvx: this stream is being captured into a graph, and the first collective of group " +
                       group.name() + " with tensors of " + device.str() +
                       " opens that device, which the hosts of all ranks do together. Next: call one collective "
                       "of the group, on all ranks, before the capture");
}

SharedStreams::Claim KernelPath::claim_stream(const StagingCopies& staging) const {
  if (!shared_ || staging.capture() != 0) return {};
  const c10::Stream stream = current_stream(staging.stream().device());
  const SharedStreams::Call call{stream, group_->rank(), group_->sequence() + 1};
  if (!staging.streams().own) return shared_->claim(call, group_->name());
  shared_->check(call, group_->name());
  return {};
}

void KernelPath::note_wait(const StagingCopies& staging, uint64_t number) const {
  if (!shared_ || staging.capture() != 0) return;
  shared_->note({current_stream(staging.stream().device()), group_->rank(), number});
}

Status KernelPath::launch(TensorOperations& collectives, StagingCopies& staging, uint64_t* ended_at) {
  return launch(collectives, staging, [&](TensorOperations& all, const Target& target) {
    Operations operations;
    for (const TensorOperation& c : all) operations.push_back(&c.operation);
    const Status status = launch_kernels(operations, target);
    if (target.capture == 0) *ended_at = group_->device().launched();  // nobody else launches meanwhile
    return status;
  });
}

Status KernelPath::launch(TensorOperations& collectives, StagingCopies& staging, const Begin& begin_them) {
  Works before;
  const auto later = c10::make_scope_exit([&] { tell(before); });  // when the lock has been let go
  MutexLock lock(mutex_);
  before = begin_what_waits();
  SharedStreams::Claim claim = claim_stream(staging);
  staging.bring(loads_of(collectives, &TensorOperation::bring));  // may throw, and then nothing has been numbered
  claim.keep();
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
  }
  Status status;
  contain_and(
      [&] {
        mutex_.held_by_caller();
        staging.start_clock();
        status = begin(staging, [&](const Target& target) { return begin_them(collectives, target); });
        if (status.ok()) staging.take_back(loads_of(collectives, &TensorOperation::take_back));
      },
      [&](const std::exception* error) {  // part of it may have been begun
        const char* const what = nvx::name(collectives.front().operation.collective);
        status = fail_silent(*group_, staging.stream().device(), what, error);
      });
  return status;
}

Status KernelPath::launch_kernels(const Operations& operations, const Target& target) {
  const Begins begins = target.capture != 0 ? Begins::kInReplays : Begins::kNow;
  return group_->device().launch({operations.data(), operations.size()}, target.native, begins);
}

/// Begins it behind what was begun last, whatever stream that was on.
Status KernelPath::begin(const StagingCopies& staging, const BeginThere& begin_there) {
  const c10::Stream& stream = staging.stream();
  const c10::StreamGuard on(stream);
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const Target target{stream, guard.getStreamNativeHandle(stream), staging.capture()};
  return launcher_->in_order(target, [&] { return begin_there(target); });
}

void KernelPath::put_off(c10::intrusive_ptr<LaunchedWork> work) {
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
  const auto later = c10::make_scope_exit([&] { tell(begun); });  // when the lock has been let go
  MutexLock lock(mutex_);
  if (!put_off_.empty() && !alike(*put_off_.front(), *work)) begun = begin_what_waits();
  put_off_.push_back(std::move(work));
  behind_.store(true, std::memory_order_release);
  if (count(put_off_) >= kernel::kLaunchJobs) {
    const Works full = begin_what_waits();
    begun.insert(begun.end(), full.begin(), full.end());
  }
}

void KernelPath::catch_up() {
  MutexLock lock(mutex_);
  const Works begun = begin_what_waits();
  lock.unlock();
  tell(begun);
}

/// The caller tells the works when it has let go of the lock.
KernelPath::Works KernelPath::begin_what_waits() {
  Works works = std::exchange(put_off_, {});
  behind_.store(false, std::memory_order_release);
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
      outcome = begin(first, [&](const Target& target) { return launch_kernels(operations, target); });
    }
  } catch (const std::exception& error) {  // part of it may have been begun
    outcome = group_->fail(system_failure("launching kernels failed", error));
  }
  for (const auto& work : works) {
    ended_at += work->collectives_.size();
    work->close(outcome, first.capture() == 0 ? ended_at : 0);
  }
  return works;
}

void KernelPath::tell(const Works& begun) {
  for (const auto& work : begun) work->tell_outcome();
}

LaunchedWork::LaunchedWork(std::shared_ptr<KernelPath> path, std::shared_ptr<Group> group, Facts facts,
                           std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded,
                           std::unique_ptr<StagingCopies> staging)
    : NvxWork(std::move(facts), std::move(outputs), recorded), path_(std::move(path)), group_(std::move(group)) {
  staging_ = std::move(staging);
  ends_on({staging_->stream()});
}

void LaunchedWork::put_off(TensorOperations collectives, std::vector<at::Tensor> used) {
  collectives_ = std::move(collectives);
  used_ = std::move(used);
  closed_.store(false, std::memory_order_release);
  path_->put_off(c10::intrusive_ptr<LaunchedWork>::reclaim_copy(this));
}

/// To be called even if beginning them failed, as part of it may have been begun.
void LaunchedWork::close(const Status& outcome, uint64_t ended_at) {
  contain("the end of a call", [&] { staging_->close(used_); });
  outcome_ = outcome;
  ended_at_ = ended_at;
  closed_.store(true, std::memory_order_release);
}

void LaunchedWork::tell_outcome() {
  used_.clear();
  collectives_.clear();
  end(outcome_, outcome_.ok() ? Hooks::kWhenThere : Hooks::kNow);
}

void LaunchedWork::catch_up() {
  if (closed_.load(std::memory_order_acquire)) return;
  origin_.check(facts_.rank);
  without_python_lock([&] { path_->catch_up(); });
}

/// Without a timeout the host waits for nothing, and only a failure that is known already is raised.
bool LaunchedWork::wait(std::chrono::milliseconds timeout) {
  catch_up();
  check();
  path_->note_wait(*staging_, facts_.sequence);
  if (!outcome_.ok()) raise(outcome_);
  if (timeout.count() > 0 && staging_->capture() == 0) wait_there(timeout);
  const Status status = group_->device().look();
  if (status.ok() || has_ended_well()) return true;
  group_->note_heard();
  raise(status);
}

/// Nothing that fails later, or was called later, changes this.
bool LaunchedWork::has_ended_well() const {
  return outcome_.ok() && ended_at_ != 0 && group_->device().ended_well(ended_at_);
}

/// Waits until it has ended on the device, or has failed.
void LaunchedWork::wait_there(std::chrono::milliseconds timeout) {
  const Deadline limit = Deadline::after(timeout);
  for (int looks = 0; !is_there() && group_->device().look().ok(); ++looks) {
    if (limit.passed(Clock::now())) raise_late(facts_.title, *group_, timeout);
    group_->look_for_interrupt();
    raise_interrupt();
    pause_after(looks);
  }
}

bool LaunchedWork::isSuccess() const { return !exception(); }

std::exception_ptr LaunchedWork::exception() const {
  if (const std::exception_ptr known = NvxWork::exception()) return known;
  const Status status = failure();
  return status.ok() ? nullptr : exception_of(status);
}

/// A kernel's failure comes when the work is over as torch sees it.
Status LaunchedWork::failure() const {
  if (NvxWork::exception()) return NvxWork::failure();
  if (!closed_.load(std::memory_order_acquire)) return {};
  const Status status = group_->device().look();
  return status.ok() || has_ended_well() ? Status() : status;
}

bool LaunchedWork::isCompleted() {
  if (!origin_.elsewhere()) catch_up();
  return NvxWork::isCompleted();
}

c10::intrusive_ptr<c10::ivalue::Future> LaunchedWork::getFuture() {
  catch_up();
  return NvxWork::getFuture();
}

void LaunchedWork::abort() {
  if (!origin_.elsewhere()) group_->abort("Work.abort()");
}

}  // namespace nvx
