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
#include "group/mailbox.h"
#include "group/relay.h"
#include "torch/convoy.h"
#include "torch/departures.h"
#include "torch/origin.h"
#include "torch/results.h"
#include "torch/transit.h"

namespace nvx {

/// Raises what a status says as the exception that torch's users know; on the main thread an interrupt goes first.
/// NVX_ON_ERROR=abort ends the process instead, unless it was the user who interrupted it.
[[noreturn]] void raise(const Status& status);
/// The same, not raised, and as every thread sees it.
std::exception_ptr exception_of(const Status& status);
/// Of a wait for as long as this. title: as in NvxWork::Facts.
[[noreturn]] void raise_late(const char* title, const Group& group, std::chrono::milliseconds timeout);

/// What a device or a backend has thrown, null for what is no std::exception: without the backtrace behind it.
std::string words_of(const std::exception* error);
/// Fails the group because a device has thrown this, or what is no std::exception, where it was asked about what it was
/// given, or given it: the others would wait for this rank in vain. what: "all_reduce".
Status fail_silent(Group& group, at::Device device, const std::string& what, const std::exception* error);

/// One collective, or several in a row, with the tensors that must live until it is done.
struct TensorOperation {
  Operation operation;
  at::Device device = at::kCPU;  ///< of its tensors
  bool by_kernels = false;       ///< they are used where they are; else a device's tensors go through host memory, ...
  bool in_chunks = false;        ///< ... and those of large operations are told where they are, for a convoy or a relay
  bool delegated = false;        ///< to a backend of torch's own, which uses them where they are
  bool on_device() const { return by_kernels || delegated; }
  /// Stand-ins for a device's tensors, which are filled before it begins.
  Loads bring;
  /// Stand-ins whose tensors get what is in them at the end.
  Loads take_back;
  /// Contiguous copies of inputs.
  std::vector<at::Tensor> stand_ins;
  std::unique_ptr<Convoy> convoy;
  std::unique_ptr<Relay> relay;  ///< what does it instead where kernels can do part of it
  Extensions::Claim claim;

  /// Whether the operation is told in the memory that the tensors are in.
  bool where_it_is() const { return device.is_cpu() || on_device() || in_chunks; }
};
using TensorOperations = c10::SmallVector<TensorOperation, 1>;

/// While it lives, tensors are memory to this thread: nothing is recorded for autograd, and it does not matter whether
/// a tensor requires grad, belongs to inference mode, or is moved on a thread that knows nothing of the caller's modes.
/// So a stand-in changes its tensor exactly as writing into its memory does.
using Movement = at::AutoDispatchBelowADInplaceOrView;

Status run_in_order(Group& group, TensorOperations& collectives, Carrier carrier);
/// Those of CPU tensors.
void copy_back(TensorOperations& collectives);
Status take_back(Transit& transit, const Loads& loads);
/// Whatever memory they use, the users' and that of stand-ins.
std::vector<at::Tensor> all_tensors(const TensorOperations& collectives, const std::vector<at::Tensor>& outputs,
                                    const std::vector<at::Tensor>& inputs);
/// Whether any of them goes in chunks.
bool in_chunks(const TensorOperations& collectives);
/// Of their tensors, which are all on one.
at::Device device_of(const TensorOperations& collectives);
/// All of what the collectives of one device bring there, or take back.
Loads loads_of(const TensorOperations& collectives, Loads TensorOperation::*which);

class WindowWork;

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
    size_t lists = 0;                      ///< in how many lists of one length a future has the outputs; 0: in one
    std::weak_ptr<Group> group = {};       ///< that fails where a device does not tell of the end
    Clock::time_point began = Clock::now();
  };
  const std::vector<c10::Stream>& streams() const { return streams_; }
  /// How many works have been begun and not ended.
  using Pending = std::shared_ptr<std::atomic<int64_t>>;

  NvxWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;
  uint64_t getSequencenumber() const override { return facts_.sequence; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  uint64_t getCompletionKey() const override { return completion_key_; }
#endif
  /// A stream can wait for what is on its way back; for what has not ended the caller does.
  void synchronize() override;
  /// Whether the results are where whoever looks finds them, on whatever stream. Throws nothing: torch's recorder asks
  /// this of each work inside the call that makes it.
  bool isCompleted() override { return Work::isCompleted() && is_there(); }
  /// Without a stream the caller is what waits.
  void blockCurrentStream() override;

  c10d::OpType type() const { return facts_.type; }
  const char* title() const { return facts_.title; }
  Clock::time_point began() const { return facts_.began; }
  Clock::time_point ended() const { return ended_; }
  /// What it ended in, once it has.
  const Status& status() const { return status_; }
  /// Counts it there until it has ended. Before it begins.
  void count_in(const Pending& pending);
  /// How many of those counted there have ended, and this thread is just telling somebody so.
  static int64_t told_here(const Pending& pending);
  /// Has the window hear of the end; false, and nothing, where that has come. Of one window at most.
  bool belong_to(c10::intrusive_ptr<WindowWork> window);
  /// Whether somebody's code runs when it ends.
  bool watched();
  /// Whether it has ended well, and somebody has waited for it or asked for its future: nothing is left to be told.
  bool settled() const;
  /// Whether its results are where whoever looks finds them; true where nobody can say, which fails the group.
  bool is_there();
  /// Whether its device did not tell: whatever it has ended in, what came of it is not known.
  bool lost() const { return lost_.load(std::memory_order_acquire); }
  /// For whoever looks after it until then.
  void tell_that_it_is_there();
  /// From its beginning to its end: on the device where that has been timed and is told.
  std::chrono::duration<float, std::milli> duration() const;

 protected:
  /// Marks the work as ended and tells those who asked. Called once, with no lock held. Throws nothing. Hooks and the
  /// clock are told now, or when the results are where whoever looks finds them: whoever else asked has streams wait.
  enum class Hooks { kNow, kWhenThere };
  void end(const Status& status, Hooks hooks = Hooks::kNow);
  /// Whether it has ended while this thread tells of an end, its own or another: who hears of one may wait for this.
  bool told_here() const;
  /// For a wait: raises if the work failed, or was made in the process that this one was forked from. Else the caller's
  /// stream waits for the results.
  void check();
  void let_torch_forget();
  /// Of tensors of devices, before it begins: the streams that its results come back on.
  void ends_on(const std::vector<c10::Stream>& streams);

  Facts facts_;
  std::vector<at::Tensor> outputs_;
  const Origin origin_;
  std::unique_ptr<Transit> transit_;  ///< null: of CPU tensors

 private:
  void complete(c10::ivalue::Future& future);
  c10::IValue value() const;
  void tell_hooks();
  void lose(const std::exception* error);
  std::chrono::duration<float, std::milli> duration_here() const;
  class Telling;
  static thread_local const Telling* innermost_;

  const uint64_t completion_key_;  // an address would be used again
  Clock::time_point ended_{};      // written before clocked_
  Status status_;                  // written before over_
  Pending pending_;
  Mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ GUARDED_BY(future_mutex_);
  c10::intrusive_ptr<WindowWork> window_ GUARDED_BY(future_mutex_);  // until the end
  std::vector<c10::Stream> streams_;
  std::atomic<bool> over_{false};
  std::atomic<bool> lost_{false};
  std::atomic<bool> clocked_{false};    // ended_ is known
  std::atomic<bool> asked_for_{false};  // waited for to the end, or its future asked for
};

/// What the group's lane carries out, in its turn.
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
  /// What is thrown here fails the group: the other ranks would wait for this one in vain.
  virtual Status carry_out(Group& group, Carrier carrier) = 0;
  /// Lets go of what only the operation needed.
  virtual void let_go() = 0;

 private:
  std::shared_ptr<Group> group_;
  Status outcome_;
};

/// Collectives.
class CollectiveWork final : public LaneWork {
 public:
  /// expected: the results of an operation on a device's tensors.
  CollectiveWork(std::shared_ptr<Group> group, Facts facts, TensorOperations collectives,
                 std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs, std::unique_ptr<Transit> transit,
                 std::shared_ptr<Results::Expected> expected = nullptr);

 private:
  Status carry_out_staged(Group& group, Carrier carrier);
  Status carry_out(Group& group, Carrier carrier) override;
  void let_go() override;

  Status haul(Group& group, Carrier carrier);

  TensorOperations collectives_;
  std::vector<at::Tensor> inputs_;
  const std::shared_ptr<Results::Expected> expected_;
};

/// A work that was over before it was made: what a synchronous call returns to those who need an object.
class DoneWork final : public NvxWork {
 public:
  /// stream: that a device's outputs come back on; transit: if they are still on their way.
  DoneWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<c10::Stream>& stream,
           std::unique_ptr<Transit> transit = nullptr)
      : NvxWork(std::move(facts), std::move(outputs), std::nullopt) {
    transit_ = std::move(transit);
    if (stream) ends_on({*stream});
  }
  /// Apart from the constructor because hooks keep it until they have been told.
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
              Extensions::Claim claim, std::shared_ptr<Departures> departures);
  /// Of a device's tensor: has host memory stand in for it, which what is sent is on its way to.
  void stage(OwnTracks& tracks, bool receives);
  /// Begins it; apart from the constructor because its end may come at once.
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
  std::shared_ptr<Departures> departures_;
  Loads loads_;  // of a device's tensor
};

/// All works of a coalescing window, as one. It ends when the last of them has ended, whoever waits for it, or nobody:
/// in the failure of the first that failed, if any did.
class WindowWork final : public NvxWork {
 public:
  WindowWork(Facts facts, std::vector<c10::intrusive_ptr<NvxWork>> works, std::vector<at::Tensor> outputs);
  /// Listens to the works; apart from the constructor because they keep it until they have ended.
  void begin();
  void one_has_ended();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;

 private:
  const std::vector<c10::intrusive_ptr<NvxWork>> works_;
  std::atomic<size_t> open_;
};

}  // namespace nvx
