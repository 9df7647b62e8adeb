#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/group.h"
#include "group/hierarchy/host_proxy.h"
#include "group/p2p/mailbox.h"
#include "group/plan/route.h"
#include "group/timeout_extensions.h"
#include "torch/core/interrupt.h"
#include "torch/core/options.h"
#include "torch/core/origin.h"
#include "torch/core/tensors.h"
#include "torch/streams/chunk_pipeline.h"
#include "torch/streams/output_hazards.h"
#include "torch/streams/pending_sends.h"
#include "torch/streams/staging_copies.h"

namespace nvx {

/// Raises a status as the exception that torch's users know. On the main thread a pending interrupt is raised instead.
/// `NVX_ON_ERROR=abort` ends the process instead, unless the user interrupted the operation or this rank aborted it.
[[noreturn]] void raise(const Status& status);
/// Returns the same exception without raising it, and ignores interrupts.
std::exception_ptr exception_of(const Status& status);
/// Ends the process for a failure that the program has not seen yet, if NVX_ON_ERROR requires it.
void end_process_if_unseen(const Status& status);

/// The text of an exception of a device or a backend, without its backtrace. null: the exception was no std::exception.
std::string text_of(const std::exception* error);
/// Fails the group because its device threw `error` when it was given work: the other ranks would otherwise wait for
/// this one until their timeout. error: as for text_of(). what: "all_reduce".
Status fail_on_device(Group& group, at::Device device, const std::string& what, const std::exception* error);

/// An operation on tensors, and the objects that must live until it has ended.
struct TensorOperation {
  Operation operation;
  at::Device device = at::kCPU;  ///< of all its tensors
  RouteFacts facts;              ///< determine the route
  /// Aliases of the program's tensors, so that `set_`, `.data` and `t_` on the originals do not affect the operation.
  Loads copies_in;                        ///< stand-ins that are filled from their tensors before the operation begins
  Loads copies_out;                       ///< stand-ins that are copied to their tensors when the operation has ended
  Tensors stand_ins;                      ///< of inputs
  std::unique_ptr<ChunkPipeline> chunks;  ///< runs the operation if it goes in chunks
  std::unique_ptr<HostProxy> proxy;       ///< runs the operation if it is proxied
  TimeoutExtensions::Claim claim;         ///< keeps an extension of its timeout until it has ended

  Route route() const { return route_of(facts); }
};
using TensorOperations = c10::SmallVector<TensorOperation, 1>;

Status run_in_order(Group& group, std::span<TensorOperation> collectives, Runner runner);
/// Fills the stand-ins of CPU tensors.
void copy_in(std::span<TensorOperation> collectives);
/// Copies the stand-ins of CPU tensors back.
void copy_back(std::span<TensorOperation> collectives);
/// All tensors whose memory the operations use: the user's tensors and stand-ins.
Tensors all_tensors(std::span<const TensorOperation> collectives, const Tensors& outputs, const Tensors& inputs);
/// The route of a call, which may be several operations: of the first one that goes in parts, otherwise of the first
/// one.
Route route_of(std::span<const TensorOperation> collectives);
/// The one device of all their tensors.
at::Device device_of(std::span<const TensorOperation> collectives);
/// The Loads of all operations. which: &TensorOperation::copies_in or copies_out.
Loads loads_of(std::span<const TensorOperation> collectives, Loads TensorOperation::*which);

class CoalescedWork;

/// The common part of all works of nvx: outputs as a result and as a future, times, and notifications of the end.
class NvxWork : public c10d::Work {
 public:
  struct Facts {
    int rank;
    c10d::OpType type;
    const char* title;  ///< "nvx:all_reduce"; null: a coalescing scope
    uint64_t sequence;
    bool timed;
    std::function<void(NvxWork&)> on_end;  ///< may be empty
    size_t lists = 0;                      ///< number of lists of outputs in a future's value; 0: one list, not nested
    std::weak_ptr<Group> group = {};       ///< runs the operation
    Clock::time_point began = Clock::now();
  };
  const std::vector<c10::Stream>& streams() const { return streams_; }
  /// Of one communicator.
  struct Counts {
    std::atomic<int64_t> pending{0};     ///< works that have begun and have not ended
    std::atomic<uint64_t> cpu_calls{0};  ///< collectives of CPU tensors that the program has called
  };
  using SharedCounts = std::shared_ptr<Counts>;

  NvxWork(Facts facts, Tensors outputs);

  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return facts_.sequence; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
  /// Blocks until the operation has ended. The caller's stream waits for results that are still being copied back.
  void synchronize() override;
  bool wait(std::chrono::milliseconds given) final { return wait_for(span_of_wait(given)); }
  /// Whether the results have arrived, so that they can be read on any stream, and the future has completed. Throws
  /// nothing: torch's recorder calls this for each work, inside the call that makes it.
  bool isCompleted() override { return Work::isCompleted() && (told_ || reporting_here()) && is_there(); }
  /// Without a stream, blocks the caller.
  void blockCurrentStream() override;
  /// Aborts the group. Does nothing in a forked child.
  void abort() override;

  c10d::OpType type() const { return facts_.type; }
  bool is_timed() const { return facts_.timed; }
  Clock::time_point began() const { return facts_.began; }
  Clock::time_point ended() const { return ended_; }
  /// The result. Valid once the work has ended.
  const Status& status() const { return status_; }
  /// The status behind exception(); ok if that is null.
  virtual Status failure() const { return status_; }
  /// Counts this work as pending until it has ended. Call it before the work begins.
  void count_in(const SharedCounts& counts);
  /// The number of works counted there whose end this thread is reporting, further up its stack.
  static int64_t reporting_here(const SharedCounts& counts);
  /// Counts a collective of CPU tensors. False if this thread runs a callback of a future, and a call outside the
  /// callback has come between the request of the future and this call: their order may depend on when results arrive.
  /// It may also be certain, as the callback may have been added after the other call.
  static bool count_call(const SharedCounts& counts);
  /// The scope will be notified of the end; false, and not notified, if that was before. At most one scope a work.
  bool belong_to(c10::intrusive_ptr<CoalescedWork> coalesced);
  /// Begins the timeouts that count from the first wait for the work.
  virtual void begin_timeout() {}
  /// Whether foreign code, such as a callback or a hook, will run when it ends.
  bool watched();
  /// Whether it has succeeded, and the program has waited for it or requested its future: nothing is left to report.
  bool settled() const { return over_ && observed_ && status_.ok(); }
  /// Whether its results can be read on any stream. If a query of the device throws, the group fails: then true.
  virtual bool is_there();
  /// The failure of its group, if a query of its device threw: the outcome is unknown, whatever the status is.
  /// Otherwise ok, and also if the group is gone.
  virtual Status loss() const;
  bool lost() const { return !loss().ok(); }
  /// Runs the hooks, as the results have arrived. Called by CompletionPoller, which keeps the work until then.
  void report_arrival();
  /// From start to end, by the device's clock if that was requested and supported, otherwise by the host's.
  std::chrono::duration<float, std::milli> duration() const;

 protected:
  /// timeout: 0 for none, never negative.
  virtual bool wait_for(std::chrono::milliseconds timeout) = 0;
  /// Marks the work as ended and notifies. Called once, with no lock held. Throws nothing. Futures complete at once,
  /// because their users make streams wait for the results. Hooks run and the clock stops at once, or only when the
  /// results have arrived.
  enum class Hooks { kNow, kWhenThere };
  void end(const Status& status, Hooks hooks = Hooks::kNow);
  /// Whether it has ended and this thread is reporting an end, its own or another's. A callback or hook may wait for
  /// this work: that wait must not block.
  bool reporting_here() const { return innermost_ && over_; }
  /// The last part of wait(): raises if the work failed, or was made before a fork of this process. Otherwise the
  /// caller's stream waits for the results.
  void check();
  void unregister_from_torch();
  /// Raises that a wait() with this timeout has timed out, or an interrupt that is pending.
  [[noreturn]] void raise_late(const Group& group, std::chrono::milliseconds timeout) const;
  /// For device tensors: adds the streams on which the results are copied back. Call it before the work begins.
  void ends_on(const std::vector<c10::Stream>& streams);

  Facts facts_;
  Tensors outputs_;
  const Origin origin_;
  std::unique_ptr<StagingCopies> staging_;  ///< null for CPU tensors

 private:
  void complete(c10::ivalue::Future& future);
  bool has_future();
  c10::IValue value() const;
  void run_hooks();
  void lose(const std::exception* error);
  struct Reporting;
  static thread_local Reporting* innermost_;

  const uint64_t completion_key_;  // a number, because a later work may have the same address
  Clock::time_point ended_{};      // written before `clocked_`
  Status status_;                  // written before `over_`
  SharedCounts counts_;
  Mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(future_mutex_);
  uint64_t calls_before_future_ GUARDED_BY(future_mutex_) = 0;  // Counts::cpu_calls at the last request of `future_`
  c10::intrusive_ptr<CoalescedWork> coalesced_ GUARDED_BY(future_mutex_);  // until the end
  std::vector<c10::Stream> streams_;
  std::atomic<bool> over_{false};
  std::atomic<bool> told_{false};  // the future has completed, and its callbacks have run
  std::atomic<bool> lost_{false};
  std::atomic<bool> clocked_{false};   // `ended_` is set
  std::atomic<bool> observed_{false};  // the program has waited for it to the end, or requested its future
};

/// A work that the group's lane runs in its turn.
class LaneWork : public NvxWork, public Task {
 public:
  LaneWork(Facts facts, Tensors outputs) : NvxWork(std::move(facts), std::move(outputs)), group_(facts_.group.lock()) {}

  void perform(Runner runner) final;
  void conclude() final;
  bool conclusion_may_block() final { return watched(); }

 protected:
  bool wait_for(std::chrono::milliseconds timeout) final;
  /// An exception fails the group, because the other ranks would wait for this one until their timeout.
  virtual Status carry_out(Group& group, Runner runner) = 0;
  virtual void release_tensors() = 0;

 private:
  const std::shared_ptr<Group> group_;
  Status outcome_;
};

/// The collectives of one call, of CPU tensors or through host memory.
class CollectiveWork final : public LaneWork {
 public:
  /// staging, expected: for device tensors.
  CollectiveWork(Facts facts, TensorOperations collectives, Tensors outputs, const Tensors& inputs,
                 std::unique_ptr<StagingCopies> staging = nullptr,
                 std::shared_ptr<OutputHazards::Expected> expected = nullptr);

 private:
  Status carry_out(Group& group, Runner runner) override;
  void release_tensors() override;

  Status copy(Group& group, Runner runner);

  TensorOperations collectives_;
  Tensors aliases_;                   // of the outputs on a device, as they were at the call
  std::vector<c10::Storage> memory_;  // of the tensors at the call: `x.data = y` would free it
  const std::shared_ptr<OutputHazards::Expected> expected_;
};

/// A work whose operation had ended before it was made: for a synchronous call whose caller needs a work.
class DoneWork final : public NvxWork {
 public:
  /// stream: the one on which a device's outputs are copied back. staging: not null if they have yet to arrive.
  DoneWork(Facts facts, Tensors outputs, const std::optional<c10::Stream>& stream,
           std::unique_ptr<StagingCopies> staging = nullptr)
      : NvxWork(std::move(facts), std::move(outputs)) {
    staging_ = std::move(staging);
    if (stream) ends_on({*stream});
  }
  /// Not in the constructor, because hooks hold a reference until they have run.
  void begin() { end({}, Hooks::kWhenThere); }

 private:
  bool wait_for(std::chrono::milliseconds) override {
    unregister_from_torch();
    return true;
  }
};

class MessageWork final : public NvxWork {
 public:
  MessageWork(Facts facts, at::Tensor tensor, std::shared_ptr<Message> message, TimeoutExtensions::Claim claim,
              std::shared_ptr<PendingSends> pending_sends);
  /// For a device tensor: allocates a stand-in in host memory, and begins to copy the data of a send there.
  void stage(OwnCommStreams& streams, bool receives);
  /// Not in the constructor, because the message may end at once.
  void begin(bool receives);

  /// torch calls getFuture() with the GIL held, and a thread that holds the mailbox may copy for milliseconds.
  void begin_timeout() override {
    without_python_lock([this] { group_->mailbox().begin_timeout(message_.get()); });
  }
  int sourceRank() const override { return message_->peer; }

 private:
  bool wait_for(std::chrono::milliseconds timeout) override;
  void send();
  void flush() { pending_sends_->flush(message_.get(), Deadline()); }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Message> message_;
  TimeoutExtensions::Claim claim_;
  std::shared_ptr<PendingSends> pending_sends_;
  c10::Storage memory_;  // of the tensor at the call: `x.data = y` would free it
  Loads loads_;          // of a device tensor
};

/// All works of a coalescing scope as one work. It ends when the last of them has ended, even without a wait. If some
/// have failed, it fails with the first failure of the list.
class CoalescedWork final : public NvxWork {
 public:
  CoalescedWork(Facts facts, std::vector<c10::intrusive_ptr<NvxWork>> works, Tensors outputs);
  /// Registers with the works. Not in the constructor, because the works hold a reference until they have ended.
  void begin();
  void one_has_ended();

  bool isCompleted() override;
  bool is_there() override;
  Status loss() const override;
  void begin_timeout() override;
  void abort() override { works_.front()->abort(); }

 private:
  bool wait_for(std::chrono::milliseconds timeout) override;

  const std::vector<c10::intrusive_ptr<NvxWork>> works_;
  std::atomic<size_t> open_;
};

}  // namespace nvx
