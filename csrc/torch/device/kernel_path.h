#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "kernel/gpu/launch_cuda.h"
#include "torch/core/ask_once.h"
#include "torch/device/shared_streams.h"
#include "torch/device/stream_order.h"
#include "torch/work.h"

namespace nvx {

/// The type of device that nvx has kernels for. It is defined in a file of its own, as tests play kernels on another
/// device.
at::DeviceType kernel_device();

/// Raises that kernels of a group run on one device of each rank, served, and not on device.
[[noreturn]] void refuse_other_device(const Group& group, at::Device served, at::Device device);

/// Raises if this thread's current stream is in a capture, as devices are opened outside of those.
void refuse_to_open(const Group& group, at::Device device);

class CallContext;
class Delegate;
class LaunchedWork;
struct Call;

/// Carries out a group's collectives by kernels on streams, where all its ranks can have that.
class KernelPath : public std::enable_shared_from_this<KernelPath> {
 public:
  KernelPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store);
  ~KernelPath();

  /// Whether kernels serve tensors of this device. May be a step of all ranks: the first call opens the device on all
  /// of them. Raises if another device of this rank is served.
  bool agree_to_serve(at::Device device);

  /// The same of the device of this number, as far as it is known without asking the other ranks.
  bool may_serve(c10::DeviceIndex device) const;

  /// Begins a call. Null where a synchronous call needs no work.
  c10::intrusive_ptr<c10d::Work> issue(CallContext& context, Call&& call) EXCLUDES(mutex_);
  /// The same of a call that the delegate carries out, which takes its turn among kernels.
  c10::intrusive_ptr<c10d::Work> issue_by(Delegate& delegate, CallContext& context, Call&& call) EXCLUDES(mutex_);

  /// Begins what was put off. Returns when that has been done, by this thread or by another.
  void catch_up() EXCLUDES(mutex_);
  void catch_up_if_behind() EXCLUDES(mutex_) {
    if (behind_.load(std::memory_order_acquire)) catch_up();
  }

  /// Notes that this thread's current stream waits for the collective of that number.
  void note_wait(const StagingCopies& staging, uint64_t number) const;

 private:
  friend class LaunchedWork;
  /// Begins collectives on the stream of the staging, behind what was begun on other streams and what was put off. The
  /// host waits for nothing. ended_at: gets the number that GroupDevice::ended_well() takes for these; it stays 0 in
  /// captures, where nobody counts.
  Status launch(TensorOperations& collectives, StagingCopies& staging, uint64_t* ended_at) EXCLUDES(mutex_);
  /// The same, but begin() begins them. The stream is the current one meanwhile.
  Status launch_by(const std::function<Status()>& begin, TensorOperations& collectives, StagingCopies& staging)
      EXCLUDES(mutex_);
  /// Calls of a coalescing scope share launches, as far as none depends on another. They are put off for that.
  c10::intrusive_ptr<c10d::Work> put_off(CallContext& context, Call&& call, std::unique_ptr<StagingCopies> staging)
      EXCLUDES(mutex_);
  /// Keeps the work's collectives back, so that they share launches with those that are put off next. They must have
  /// numbers, and their stream must have been claimed. They begin when they fill a launch, before anything else of the
  /// group does, or in catch_up().
  void put_off(c10::intrusive_ptr<LaunchedWork> work) EXCLUDES(mutex_);
  /// Raises if what is called next would come, on this thread's current stream, behind another rank's part of the same
  /// collective. Claim::keep() is to be called once it has begun.
  [[nodiscard]] SharedStreams::Claim claim_stream(const StagingCopies& staging) const;
  c10::intrusive_ptr<c10d::Work> hand_back(CallContext& context, const Call& call, const Status& begun,
                                           uint64_t ended_at, std::unique_ptr<StagingCopies> staging);
  using Works = std::vector<c10::intrusive_ptr<LaunchedWork>>;
  using Operations = c10::SmallVector<const Operation*, kernel::kLaunchJobs>;
  /// Begins what was put off, and returns the works, which are to be told when the mutex has been let go.
  Works begin_what_waits() REQUIRES(mutex_);
  /// The copies to stand-ins and the numbers, before a launch. May throw, and then nothing has been numbered.
  void prepare(TensorOperations& collectives, StagingCopies& staging) REQUIRES(mutex_);
  /// Gives them their numbers, and the time that they have.
  void number(TensorOperations& collectives);
  /// Fails the group, whose device threw `error` in a launch: part of it may have been begun.
  Status lose(const TensorOperations& collectives, const StagingCopies& staging, const std::exception* error);
  static void tell(const Works& begun);
  /// A step of all ranks: opens the device on all of them, or on none.
  bool open(at::Device device);

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  AskOnce served_;
  std::shared_ptr<SharedStreams> shared_;  // set before served_ is answered
  const std::shared_ptr<TorchStreamOrder> order_ = std::make_shared<TorchStreamOrder>();
  Mutex mutex_;                       // held while operations are launched, as all ranks launch them in one order
  Works put_off_ GUARDED_BY(mutex_);  // all have the same stream, capture and timeout
  std::atomic<bool> behind_{false};   // something is put off
};

}  // namespace nvx
