#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>
#include <vector>

#include "group/group.h"
#include "group/mailbox.h"

namespace nvx {

/// Raises what a status says as the exception that torch's users know. NVX_ON_ERROR=abort ends the process instead.
[[noreturn]] void raise(const Status& status);
std::exception_ptr exception_of(const Status& status);

/// One collective, or several in a row, with the tensors that must live until it is done.
struct Collective {
  Operation operation;
  /// (the user's tensor, the contiguous one that stands in for it): copied back at the end.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;
  /// Contiguous copies of inputs.
  std::vector<at::Tensor> stand_ins;
};
using Collectives = c10::SmallVector<Collective, 1>;

/// While it lives, tensors are memory to this thread: nothing is recorded for autograd, and it does not matter whether
/// a tensor requires grad, belongs to inference mode, or is moved on a thread that knows nothing of the caller's modes.
/// So a stand-in changes its tensor exactly as writing into its memory does.
using Movement = at::AutoDispatchBelowADInplaceOrView;

Status run_in_order(Group& group, Collectives& collectives, Carrier carrier);
void copy_back(Collectives& collectives);

/// What every kind of nvx work has: its outputs as a result and as a future, its times, and who is told of its end.
class NvxWork : public c10d::Work {
 public:
  struct Facts {
    int rank;
    c10d::OpType type;
    const char* title;  ///< for the profiler; null: not recorded
    uint64_t sequence;
    bool timed;
    std::function<void(NvxWork&)> on_end;  ///< may be empty
  };

  NvxWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return facts_.sequence; }
#ifdef C10D_BACKEND_HAS_HOOKS
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
  void synchronize() override {}

  c10d::OpType type() const { return facts_.type; }
  const char* title() const { return facts_.title; }
  Clock::time_point began() const { return began_; }
  Clock::time_point ended() const { return ended_; }

 protected:
  /// Marks the work as ended and tells those who asked. Called once, with no lock held.
  void end(const Status& status);
  /// Whether somebody's code runs when it ends.
  bool watched();
  /// For a wait: raises if the work failed.
  void check();

  Facts facts_;
  std::vector<at::Tensor> outputs_;

 private:
  const uint64_t completion_key_;  // an address would be used again
  Clock::time_point began_ = Clock::now();
  Clock::time_point ended_{};
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> over_{false};
  std::atomic<bool> interrupted_{false};
};

/// Collectives that run in the group's lane; or that have run already.
class CollectiveWork final : public NvxWork, public Task {
 public:
  CollectiveWork(std::shared_ptr<Group> group, Facts facts, Collectives collectives, std::vector<at::Tensor> outputs,
                 std::vector<at::Tensor> inputs);

  void perform(Carrier carrier) override;
  void conclude() override;
  bool conclusion_may_block() override { return watched(); }
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { group_->abort("Work.abort()"); }

 private:
  std::shared_ptr<Group> group_;
  Collectives collectives_;
  std::vector<at::Tensor> inputs_;
  Status status_;
};

/// A work that was over before it was made: what a synchronous call returns to those who need an object.
class DoneWork final : public NvxWork {
 public:
  DoneWork(Facts facts, std::vector<at::Tensor> outputs) : NvxWork(std::move(facts), std::move(outputs), std::nullopt) {
    end({});
  }
  bool wait(std::chrono::milliseconds) override { return true; }
};

/// One send or receive.
class MessageWork final : public NvxWork {
 public:
  MessageWork(std::shared_ptr<Group> group, Facts facts, at::Tensor tensor, std::shared_ptr<Message> message);
  /// Begins it; apart from the constructor because its end may come at once.
  void begin(bool receives);

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return message_->peer; }
  void abort() override { group_->abort("Work.abort()"); }

 private:
  std::shared_ptr<Group> group_;
  std::shared_ptr<Message> message_;
};

/// All works of a coalescing window, as one.
class WindowWork final : public NvxWork {
 public:
  WindowWork(Facts facts, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace nvx
