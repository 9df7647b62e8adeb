#include "torch/device/launched_work.h"

#include "base/contain.h"
#include "torch/core/interrupt.h"

namespace nvx {

LaunchedWork::LaunchedWork(std::shared_ptr<KernelPath> path, Facts facts, const Call& call,
                           std::unique_ptr<StagingCopies> staging)
    : NvxWork(std::move(facts), call.outputs), path_(std::move(path)), group_(facts_.group.lock()) {
  staging_ = std::move(staging);
  ends_on({staging_->stream()});
}

/// Call it even if the launch failed, because part of it may have begun. If the device refuses, no stream would wait
/// for the results, so the operation fails. The release store makes `outcome_` and `ended_at_` visible to every thread
/// that loads true from `closed_`.
void LaunchedWork::close(const Status& outcome, uint64_t ended_at) {
  outcome_ = outcome;
  contain_and([&] { staging_->close(used_); },
              [&](const std::exception* error) {
                const Status lost = path_->lose(collectives_, *staging_, error);
                if (outcome_.ok()) outcome_ = lost;
              });
  ended_at_ = ended_at;
  closed_.store(true, std::memory_order_release);
}

void LaunchedWork::report_outcome() {
  used_.clear();
  collectives_.clear();
  end(outcome_, outcome_.ok() ? Hooks::kWhenThere : Hooks::kNow);
}

void LaunchedWork::flush_postponed() {
  if (closed_.load(std::memory_order_acquire)) return;
  origin_.check(facts_.rank);
  without_python_lock([&] { path_->flush_postponed(); });
}

/// Without a timeout the host does not wait, and only a failure that is already known is raised.
bool LaunchedWork::wait_for(std::chrono::milliseconds timeout) {
  flush_postponed();
  check();
  path_->note_wait(*staging_, facts_.sequence);
  if (!outcome_.ok()) raise(outcome_);
  Status status;
  if (timeout.count() > 0 && staging_->capture() == 0) status = wait_there(timeout);
  if (status.ok()) status = group_->device().check_kernels();
  if (status.ok() || has_ended_well()) return true;
  group_->note_failure_seen();
  raise(status);
}

/// Waits until the collectives have ended on the device, or have failed.
Status LaunchedWork::wait_there(std::chrono::milliseconds timeout) {
  const auto there = [this] { return is_there(); };
  const std::optional<Status> end = wait_on_device(*group_, there, Deadline::after(timeout));
  if (!end) raise_late(*group_, timeout);
  raise_interrupt();
  return *end;
}

std::exception_ptr LaunchedWork::exception() const {
  if (const std::exception_ptr known = NvxWork::exception()) return known;
  const Status status = failure();
  return status.ok() ? nullptr : exception_of(status);
}

/// A kernel may fail after torch considers the work complete.
Status LaunchedWork::failure() const {
  if (NvxWork::exception()) return NvxWork::failure();
  if (!closed_.load(std::memory_order_acquire)) return {};
  const Status status = group_->device().check_kernels();
  return status.ok() || has_ended_well() ? Status() : status;
}

bool LaunchedWork::isCompleted() {
  if (!origin_.elsewhere()) flush_postponed();
  return NvxWork::isCompleted();
}

c10::intrusive_ptr<c10::ivalue::Future> LaunchedWork::getFuture() {
  flush_postponed();
  return NvxWork::getFuture();
}

}  // namespace nvx
