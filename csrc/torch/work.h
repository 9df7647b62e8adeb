#pragma once

#include <torch/version.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/extensions.h"
#include "group/group.h"
#include "group/hierarchy/host_proxy.h"
#include "group/p2p/mailbox.h"
#include "group/plan/route.h"
#include "torch/core/origin.h"
#include "torch/device/chunk_pipeline.h"
#include "torch/device/output_hazards.h"
#include "torch/device/pending_sends.h"
#include "torch/device/staging_copies.h"

namespace nvx {

/// Raises what a status says, as the exception that torch's users know. On the main thread an interrupt is raised
/// first. NVX_ON_ERROR=abort ends the process instead, unless the user interrupted it or this rank itself called it
/// off.
[[noreturn]] void raise(const Status& status);
/// The same exception, not raised, and without regard to interrupts.
std::exception_ptr exception_of(const Status& status);
/// Ends the process because of a failure that nobody has heard of yet, where NVX_ON_ERROR says so.
void end_process_if_unheard(const Status& status);
/// Raises that a wait() with this timeout has run out of time. title: as in NvxWork::Facts.
[[noreturn]] void raise_late(const char* title, const Group& group, std::chrono::milliseconds timeout);

/// What a device or a backend has said in what it threw, without the backtrace behind that. null: it threw something
/// that is no std::exception.
std::string words_of(const std::exception* error);
/// Fails the group because its device threw `error` when it was given work, or asked about it: the other ranks would
/// wait for this one in vain. error: as for words_of(). what: "all_reduce".
Status fail_silent(Group& group, at::Device device, const std::string& what, const std::exception* error);

/// An operation on tensors, and all that must live until it is done.
struct TensorOperation {
  Operation operation;
  at::Device device = at::kCPU;           ///< which all of its tensors are on
  RouteFacts facts;                       ///< what its route is chosen by
  Loads bring;                            ///< stand-ins that are filled from their tensors before it begins
  Loads take_back;                        ///< stand-ins whose contents their tensors get when it has ended
  std::vector<at::Tensor> stand_ins;      ///< of inputs, filled already
  std::unique_ptr<ChunkPipeline> chunks;  ///< carries it out where it goes in chunks
  std::unique_ptr<HostProxy> proxy;       ///< carries it out where it is proxied
  Extensions::Claim claim;                ///< keeps time that was added to its timeout, until it has ended

  Route route() const { return route_of(facts); }
};
using TensorOperations = c10::SmallVector<TensorOperation, 1>;

/// While it lives, copies on this thread treat tensors as plain memory: nothing is recorded for autograd, and it does
/// not matter whether a tensor requires grad, belongs to inference mode, or is copied on a thread that knows nothing of
/// the caller's modes. So copying a stand-in back has exactly the effect of writing into the tensor's memory.
using Movement = at::AutoDispatchBelowADInplaceOrView;

Status run_in_order(Group& group, TensorOperations& collectives, Carrier carrier);
/// Copies the stand-ins of CPU tensors back.
void copy_back(TensorOperations& collectives);
Status take_back(StagingCopies& staging, const Loads& loads);
/// All tensors whose memory they use: the users', and stand-ins.
std::vector<at::Tensor> all_tensors(const TensorOperations& collectives, const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs);
/// The route of a call, which may be several operations: that of the first that goes in parts, else that of the first.
Route route_of(const TensorOperations& collectives);
/// The one device that all of their tensors are on.
at::Device device_of(const TensorOperations& collectives);
/// What all of them bring, or take back. which: &TensorOperation::bring or take_back.
Loads loads_of(const TensorOperations& collectives, Loads TensorOperation::*which);

class CoalescedWork;

/// What all works of nvx have in common: outputs as a result and as a future, times, and who is told of the end.
class NvxWork : public c10d::Work {
 public:
  struct Facts {
    int rank;
    c10d::OpType type;
    const char* title;  ///< for the profiler; null: not recorded
    uint64_t sequence;
    bool timed;
    std::function<void(NvxWork&)> on_end;  ///< may be empty
    size_t lists = 0;                      ///< a future's value is so many lists of outputs; 0: one list, not nested
    std::weak_ptr<Group> group = {};       ///< fails where a device does not tell of the end
    Clock::time_point began = Clock::now();
  };
  const std::vector<c10::Stream>& streams() const { return streams_; }
  /// A count of works that have been begun and have not ended.
  using Pending = std::shared_ptr<std::atomic<int64_t>>;

  NvxWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return facts_.sequence; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
  /// The caller waits until the operation has ended. Its stream waits for results that are still on their way back.
  void synchronize() override;
  /// Whether the results have arrived, so that they can be read on any stream. Throws nothing: torch's recorder asks
  /// this of each work inside the call that makes it.
  bool isCompleted() override { return Work::isCompleted() && is_there(); }
  /// Where there is no stream, the caller waits.
  void blockCurrentStream() override;

  c10d::OpType type() const { return facts_.type; }
  const char* title() const { return facts_.title; }
  bool is_timed() const { return facts_.timed; }
  Clock::time_point began() const { return facts_.began; }
  Clock::time_point ended() const { return ended_; }
  /// What it has ended in; only once it has.
  const Status& status() const { return status_; }
  /// The status that exception() is made of; ok where that is null.
  virtual Status failure() const { return status_; }
  /// Counts this work there until it has ended. To be called before it begins.
  void count_in(const Pending& pending);
  /// How many of the works counted there have ended while this thread is still telling somebody so, further up its
  /// stack.
  static int64_t told_here(const Pending& pending);
  /// The coalescing scope will hear of the end. False, and it will not, if the work has ended already. A work belongs
  /// to one coalescing scope at most.
  bool belong_to(c10::intrusive_ptr<CoalescedWork> coalesced);
  /// Whether code of somebody else, such as a callback or a hook, will run when it ends.
  bool watched();
  /// Whether it has ended well, and somebody has waited for it or asked for its future: then it has nothing left to
  /// tell.
  bool settled() const;
  /// Whether its results have arrived, so that they can be read on any stream. Where the device does not tell, the
  /// group fails and the answer is true.
  virtual bool is_there();
  /// Whether its device did not tell: then, whatever the status says, nobody knows what came of it.
  virtual bool lost() const { return lost_.load(std::memory_order_acquire); }
  /// Tells hooks that the results have arrived. For CompletionPoller, which looks after the work until then.
  void tell_that_it_is_there();
  /// From its beginning to its end: by the device's clock where that was asked for and the device tells, else by the
  /// host's.
  std::chrono::duration<float, std::milli> duration() const;

 protected:
  /// Marks the work as ended and tells those who asked. Called once, with no lock held. Throws nothing. Futures are
  /// told at once, as whoever hears of them has streams wait for the results. Hooks and the clock are told at once,
  /// too, or only when the results have arrived.
  enum class Hooks { kNow, kWhenThere };
  void end(const Status& status, Hooks hooks = Hooks::kNow);
  /// Whether it has ended, and this thread is telling somebody of an end, its own or another's. A callback or hook that
  /// is told may wait for this work: that wait must not block.
  bool told_here() const;
  /// The end of a wait(): raises if the work failed, or was made in the process that this one was forked from.
  /// Otherwise the caller's stream waits for the results.
  void check();
  void let_torch_forget();
  /// For tensors of devices: adds the streams that the results come back on. To be called before it begins.
  void ends_on(const std::vector<c10::Stream>& streams);

  Facts facts_;
  std::vector<at::Tensor> outputs_;
  const Origin origin_;
  std::unique_ptr<StagingCopies> staging_;  ///< null for CPU tensors

 private:
  void complete(c10::ivalue::Future& future);
  bool has_future();
  c10::IValue value() const;
  void tell_hooks();
  void lose(const std::exception* error);
  std::chrono::duration<float, std::milli> duration_here() const;
  class Telling;
  static thread_local const Telling* innermost_;

  const uint64_t completion_key_;  // a number, as the address of a work may be that of a later one
  Clock::time_point ended_{};      // written before clocked_
  Status status_;                  // written before over_
  Pending pending_;
  Mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(future_mutex_);
  c10::intrusive_ptr<CoalescedWork> coalesced_ GUARDED_BY(future_mutex_);  // until the end
  std::vector<c10::Stream> streams_;
  std::atomic<bool> over_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> clocked_{false};    // ended_ is known
  std::atomic<bool> asked_for_{false};  // waited for to the end, or its future asked for
};

/// A work that the group's lane carries out when its turn has come.
class LaneWork : public NvxWork, public Task {
 public:
  LaneWork(std::shared_ptr<Group> group, Facts facts, std::vector<at::Tensor> outputs,
           const std::optional<std::vector<at::Tensor>>& recorded);

  void perform(Carrier carrier) final;
  void conclude() final;
  bool conclusion_may_block() final { return watched(); }
  bool wait(std::chrono::milliseconds timeout) final;
  void abort() final;

 protected:
  /// What this throws fails the group, as the other ranks would wait for this one in vain.
  virtual Status carry_out(Group& group, Carrier carrier) = 0;
  /// Lets go of what only the operation needed.
  virtual void let_go() = 0;

 private:
  std::shared_ptr<Group> group_;
  Status outcome_;
};

/// The collectives of one call, of CPU tensors or through host memory.
class CollectiveWork final : public LaneWork {
 public:
  /// staging, expected: for tensors of a device.
  CollectiveWork(std::shared_ptr<Group> group, Facts facts, TensorOperations collectives,
                 std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                 std::unique_ptr<StagingCopies> staging = nullptr,
                 std::shared_ptr<OutputHazards::Expected> expected = nullptr);

 private:
  Status carry_out_staged(Group& group, Carrier carrier);
  Status carry_out(Group& group, Carrier carrier) override;
  void let_go() override;

  Status copy(Group& group, Carrier carrier);

  TensorOperations collectives_;
  std::vector<at::Tensor> inputs_;
  const std::shared_ptr<OutputHazards::Expected> expected_;
};

/// A work whose operation had ended before it was made: what a synchronous call returns to those who need a work.
class DoneWork final : public NvxWork {
 public:
  /// stream: the one that a device's outputs come back on. staging: not null if they are still on their way.
  DoneWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<c10::Stream>& stream,
           std::unique_ptr<StagingCopies> staging = nullptr)
      : NvxWork(std::move(facts), std::move(outputs), std::nullopt) {
    staging_ = std::move(staging);
    if (stream) ends_on({*stream});
  }
  /// Not in the constructor, because hooks keep the work until they have been told.
  void begin() { end({}, Hooks::kWhenThere); }
  bool wait(std::chrono::milliseconds) override {
    let_torch_forget();
    return true;
  }
};

/// One send or receive.
class MessageWork final : public NvxWork {
 public:
  MessageWork(std::shared_ptr<Group> group, Facts facts, at::Tensor tensor, std::shared_ptr<Message> message,
              Extensions::Claim claim, std::shared_ptr<PendingSends> pending_sends);
  /// For a device's tensor: has host memory stand in for it, and begins to copy there what is sent.
  void stage(OwnCommStreams& streams, bool receives);
  /// Not in the constructor, because the end may come at once.
  void begin(bool receives);

  bool wait(std::chrono::milliseconds timeout) override;
  int sourceRank() const override { return message_->peer; }
  void abort() override;

 private:
  void send();
  void see_off();

  std::shared_ptr<Group> group_;
  std::shared_ptr<Message> message_;
  Extensions::Claim claim_;
  std::shared_ptr<PendingSends> pending_sends_;
  Loads loads_;  // of a device's tensor
};

/// All works of a coalescing coalescing scope, as one. It ends when the last of them has ended, whether or not anybody
/// waits for it. If some have failed, it fails as the first of them did.
class CoalescedWork final : public NvxWork {
 public:
  CoalescedWork(Facts facts, std::vector<c10::intrusive_ptr<NvxWork>> works, std::vector<at::Tensor> outputs);
  /// Listens to the works. Not in the constructor, because they keep it until they have ended.
  void begin();
  void one_has_ended();

  bool isCompleted() override;
  bool is_there() override;
  bool lost() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 private:
  const std::vector<c10::intrusive_ptr<NvxWork>> works_;
  std::atomic<size_t> open_;
};

}  // namespace nvx
