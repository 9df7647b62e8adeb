#pragma once

#include <atomic>
#include <memory>

#include "torch/call/call.h"
#include "torch/device/kernel_path.h"

namespace nvx {

/// The work of collectives that kernels or a delegate run. The work ends when they have been launched or captured, and
/// wait() makes the caller's stream wait for them.
class LaunchedWork final : public NvxWork {
 public:
  LaunchedWork(std::shared_ptr<KernelPath> path, Facts facts, const Call& call, std::unique_ptr<StagingCopies> staging);
  /// For collectives that have been launched. ended_at: from KernelPath::launch(). Not in the constructor, because
  /// hooks hold a reference until they have run.
  void begin(uint64_t ended_at) {
    ended_at_ = ended_at;
    end({}, Hooks::kWhenThere);
  }

  bool isCompleted() override;
  bool isSuccess() const override { return !exception(); }
  std::exception_ptr exception() const override;
  Status failure() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  friend class KernelPath;
  bool wait_for(std::chrono::milliseconds timeout) override;
  void flush_postponed();
  Status wait_there(std::chrono::milliseconds timeout);
  void close(const Status& outcome, uint64_t ended_at);
  /// Later failures and later calls do not change the result.
  bool has_ended_well() const { return outcome_.ok() && ended_at_ != 0 && group_->device().finished() >= ended_at_; }
  void report_outcome();

  const std::shared_ptr<KernelPath> path_;
  const std::shared_ptr<Group> group_;
  TensorOperations collectives_;  // postponed: any query of this work launches them
  Tensors used_;
  Status outcome_;                  // of postponed collectives; this and ended_at_ are written before closed_
  uint64_t ended_at_ = 0;           // as for KernelPath::launch()
  std::atomic<bool> closed_{true};  // the collectives have been launched, or the launch failed
};

}  // namespace nvx
