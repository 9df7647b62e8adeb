#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <memory>

#include "base/mutex.h"
#include "kernel/gpu/launch_cuda.h"
#include "torch/call/coalescing.h"
#include "torch/call/work.h"
#include "torch/core/agree_once.h"
#include "torch/streams/shared_streams.h"
#include "torch/streams/stream_order.h"

namespace nvx {

class TorchStore;

/// Whether `NVX_KERNELS` or the group's options let kernels serve it.
bool may_use_kernels(Group& group);

/// Raises that the group's kernels run on one device of each rank: on `served`, not on `device`.
[[noreturn]] void refuse_other_device(const Group& group, at::Device served, at::Device device);

/// Raises if this thread's current stream is in a capture: devices cannot be opened inside one.
void refuse_to_open(const Group& group, at::Device device);

/// A store for the ranks of `group` while they open devices: its requests end with the group's failure.
TorchStore store_beside(const Group& group, c10::intrusive_ptr<c10d::Store> store);

/// Opens the device on all ranks of the group: see `DeviceCommunicator::open()`. Raises if the group has failed.
bool open_device(Group& group, const c10::intrusive_ptr<c10d::Store>& store, at::Device device,
                 const std::shared_ptr<TorchStreamOrder>& order);

class CallContext;
class Delegate;
class LaunchedWork;
struct Call;

/// Runs a group's collectives with kernels on streams, if all its ranks can.
class KernelPath : public std::enable_shared_from_this<KernelPath> {
 public:
  KernelPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store);
  ~KernelPath();

  /// Whether kernels serve tensors of this device. May be a collective call: the first call opens the device on all
  /// ranks. Raises if another device of this rank is served.
  bool agree_to_serve(at::Device device);

  /// The same for the device with this index, as far as this rank can decide without the others.
  bool may_serve(c10::DeviceIndex device) const;

  /// Begins a call, with kernels or, in order with them, by the delegate. Returns its work, or null if a synchronous
  /// call needs none.
  IntrusiveWork issue(CallContext& context, Call&& call, Delegate* delegate) EXCLUDES(mutex_);

  /// Begins a batch of messages by the delegate, in order with collectives.
  c10::intrusive_ptr<NvxWork> begin_delegated(CallContext& context, const DelegatedMessages& batch, Delegate& delegate,
                                              PendingSends& earlier) EXCLUDES(mutex_);

  /// Begins the postponed collectives. Returns when they have begun, on this thread or on another.
  void flush_postponed() EXCLUDES(mutex_);
  void flush_if_postponed() EXCLUDES(mutex_) {
    if (has_postponed_.load(std::memory_order_acquire)) flush_postponed();
  }

  /// Makes the stream wait for results that will be written to memory of the call's tensors. The host waits until the
  /// stream can: results of operations that are still queued in the lane have no stream yet.
  void follow_hazards(CallContext& context, const Call& call, const c10::Stream& stream) EXCLUDES(mutex_);

  /// Notes that this thread's current stream waits for the collective with that number.
  void note_wait(const StagingCopies& staging, uint64_t number) const;

 private:
  friend class LaunchedWork;
  /// Begins collectives on the staging's stream, after earlier launches on other streams and after postponed ones. The
  /// host does not wait. ended_at: receives the value that DeviceCommunicator::finished() has at the end of these
  /// collectives. It stays 0 for a delegate's, and in captures, whose launches are not counted.
  Status launch(std::span<TensorOperation> collectives, StagingCopies& staging, Delegate* delegate, uint64_t* ended_at)
      EXCLUDES(mutex_);
  Status launch(const DelegatedMessages& batch, StagingCopies& staging, Delegate& delegate, PendingSends& earlier)
      EXCLUDES(mutex_);
  /// Postpones a call of a coalescing scope, so that independent calls share launches.
  IntrusiveWork postpone(CallContext& context, Call&& call, std::unique_ptr<StagingCopies> staging) EXCLUDES(mutex_);
  /// The same for a work whose collectives have numbers, and whose stream is claimed. They begin when they fill a
  /// launch, before any other work of the group, or in flush_postponed().
  void postpone(c10::intrusive_ptr<LaunchedWork> work) EXCLUDES(mutex_);
  /// Raises if the next call would run, on this thread's current stream, after another rank's part of the same
  /// collective. Call Claim::keep() once the call has begun.
  [[nodiscard]] SharedStreams::Claim claim_stream(const StagingCopies& staging) const;
  using Works = std::vector<c10::intrusive_ptr<LaunchedWork>>;
  using Operations = c10::SmallVector<const Operation*, kernel::kLaunchJobs>;
  /// Launches the postponed collectives and returns their works. The caller notifies these after it has released the
  /// mutex.
  Works begin_postponed() REQUIRES(mutex_);
  /// Enqueues the copies to stand-ins and assigns the numbers, before a launch. If it throws, no number has been
  /// assigned.
  void prepare(std::span<TensorOperation> collectives, StagingCopies& staging) REQUIRES(mutex_);
  /// Assigns numbers and timeouts.
  void number(std::span<TensorOperation> collectives);
  /// Fails the group, whose device threw `error` in a launch: part of the launch may have begun.
  Status lose(std::span<const TensorOperation> collectives, const StagingCopies& staging, const std::exception* error);
  static void report(const Works& begun);
  /// A collective call: opens the device on all ranks, or on none.
  bool open(at::Device device);

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  AgreeOnce served_;
  std::shared_ptr<SharedStreams> shared_;  // set before `served_` has an answer
  const std::shared_ptr<TorchStreamOrder> order_ = std::make_shared<TorchStreamOrder>();
  Mutex mutex_;                         // held during launches, because all ranks launch in one order
  Works postponed_ GUARDED_BY(mutex_);  // all have the same stream, capture and timeout
  std::atomic<bool> has_postponed_{false};
};

}  // namespace nvx
