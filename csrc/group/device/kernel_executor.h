#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "group/core/diagnosis.h"
#include "group/device/channel_resources.h"
#include "group/device/launch_batch.h"
#include "group/device/stream_order.h"
#include "group/plan/device_plan.h"
#include "group/plan/operation.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/signals.h"

namespace nvx {

/// One rank's part of a group's collectives on GPUs. Operations become kernels on the caller's streams, in the order of
/// the calls to `launch()`, which must be the same on all ranks, including replays of graphs. Kernels of one channel
/// must not overlap: the caller orders a launch on another stream, or a replay, behind the last one. The first failure
/// stays.
class KernelExecutor {
 public:
  /// Collective, on a thread whose current device is this rank's. Throws Error, on all ranks unless one has exited.
  KernelExecutor(DeviceRegistry& registry, Bootstrap& bootstrap, const ChannelOptions& options,
                 std::shared_ptr<kernel::KernelLauncher> launcher, std::shared_ptr<StreamOrder> order);
  ~KernelExecutor();

  /// Launches operations in order. Their pointers are addresses of this rank's device; the memory must stay valid until
  /// the stream has passed the operations. `timeout` applies to each operation without its own; 0: none. Non-blocking,
  /// and does not allocate unless something fails. kInvalid: nothing has been launched and the group is unchanged; any
  /// other error: the group has failed. In a capture, each replay performs the operations, with this timeout.
  /// `completion` is written when all operations have ended well.
  Status launch(std::span<const Operation* const> operations, const LaunchStream& stream,
                std::chrono::milliseconds timeout, const CompletionFlag& completion = {})
      EXCLUDES(launch_mutex_, mutex_);

  /// Launches signals of symmetric memory, in the order of their stream alone. Non-blocking. Errors as `launch()`.
  Status signal(const kernel::SignalJob& job, const LaunchStream& stream) EXCLUDES(launch_mutex_, mutex_);
  /// Whether any have been launched, before `finalize()`.
  bool has_signals() const { return has_signals_.load(std::memory_order_acquire) && !finalized_; }
  /// False also while one is being launched. Asks the driver, which may block while a launch of another thread does.
  bool signals_have_ended() const EXCLUDES(signals_mutex_);

  /// The first failure, or ok. Reads host memory only, so it is cheap enough for every launch. Any thread may call it.
  Status verdict() EXCLUDES(mutex_);

  /// The number of operations launched, and of those ended well according to the device, which reports once per launch.
  /// Both start at the options' `first_epoch`. Replays count as neither.
  uint64_t launched() const { return launched_.load(std::memory_order_acquire); }
  uint64_t finished() const;
  /// The device's own counts, with replays: the last epochs begun and ended well. They wrap. Reported as `finished()`.
  uint32_t begun_epoch() const;
  uint32_t ended_epoch() const;
  /// The number of pieces transferred without staging in either direction. Reported like `finished()`; wraps.
  uint32_t direct() const;
  /// Whether graphs may exist that contain its operations. Their replays are not announced.
  bool may_be_replayed() const { return captured_.load(std::memory_order_acquire) != 0 && !finalized_; }

  /// Whether all operations have ended, as far as the host has seen. Kernels may still be storing to memory of peers,
  /// because their reports are not ordered behind these stores.
  bool settled() const;

  DeviceChoice choose(const Operation& operation) const;

  /// Refuses later launches. Waits for the kernels in flight while one ends in each of the options' `drain_timeout`
  /// and the user does not interrupt it, and then aborts them. If kernels may still write, or if graphs may exist, all
  /// memory that they write to stays until the process ends; later replays do nothing. True if the streams have passed
  /// all launches, and so all stores to memory of peers are complete: only then may this rank announce that it has
  /// left.
  bool finalize() EXCLUDES(launch_mutex_);

  /// Ends the operations in flight here promptly and refuses later ones. `why` becomes the failure unless there already
  /// is one. Any thread may call it, at any time; it does not wait. A kernel that begins, also in a replay, once the
  /// device has carried out a small copy that this starts writes nothing; `finalize()` waits for that copy.
  void abort(const Status& why = {}) EXCLUDES(mutex_);

  /// Marks a rank as dead. Call it before `abort()`: kernels that give up then do not write to its memory.
  void note_dead(int rank);

  const kernel::DeviceShape& shape() const { return resources_.channel().shape; }
  const ChannelResources& resources() const { return resources_; }
  void update_pools() { resources_.update_pools(); }

 private:
  /// A launched operation, for error texts. `kCalls` exceeds the number that a stream holds back.
  struct Call {
    uint64_t epoch = 0;  ///< the value of `launched_` once it is launched
    uint64_t number = 0;
    kernel::Fingerprint fingerprint;
    std::chrono::milliseconds timeout{0};
  };
  static constexpr size_t kCalls = 4096;
  /// In the id of a job: if set, the rest is an index into `captured_calls_`; otherwise the count of launches.
  static constexpr uint32_t kCaptured = uint32_t(1) << 31;
  static uint32_t call_of(uint64_t epoch) { return uint32_t(epoch) & ~kCaptured; }

  Status launch_batches(std::span<const Operation* const> operations, const LaunchStream& stream,
                        std::chrono::milliseconds timeout, const CompletionFlag& completion) REQUIRES(launch_mutex_)
      EXCLUDES(mutex_);
  uint32_t next_call(Begins begins) const;
  size_t gather(std::span<const Operation* const> operations, std::chrono::milliseconds timeout, uint32_t call)
      REQUIRES(launch_mutex_);
  kernel::Job job_of(const Operation& operation, uint32_t index, kernel::Piece* table,
                     std::chrono::milliseconds timeout) const;
  Status refused(const Status& status, Begins begins, bool is_first) EXCLUDES(mutex_);
  Status not_captured(const Status& status) const;
  void remember(std::span<const Operation* const> operations, std::chrono::milliseconds timeout, Begins begins)
      EXCLUDES(mutex_);
  Status fail(const Status& status) REQUIRES(mutex_);
  bool has_verdict() const;
  bool has_ended() const;
  bool await_end(std::chrono::milliseconds most, bool* stopped = nullptr) EXCLUDES(launch_mutex_);
  Status explain(const kernel::DeviceVerdict& verdict) REQUIRES(mutex_);
  Status explain_abort() REQUIRES(mutex_);
  Failure mismatch(const kernel::DeviceVerdict& verdict, const std::string& context) const REQUIRES(mutex_);
  const Call* find(uint32_t call) const REQUIRES(mutex_);
  std::string describe_call(uint32_t call, uint32_t epoch) const REQUIRES(mutex_);
  std::string describe_epoch(uint32_t epoch) const REQUIRES(mutex_);
  std::string self() const { return diagnosis_.self(); }

  const std::shared_ptr<kernel::KernelLauncher> launcher_;
  const std::shared_ptr<StreamOrder> order_;
  ChannelResources resources_;
  const DevicePlanFacts facts_;
  const Diagnosis diagnosis_;
  std::atomic<uint64_t> launched_;
  std::atomic<uint32_t> captured_{0};  // operations captured so far
  std::atomic<bool> failed_{false}, has_signals_{false};
  std::atomic<bool> may_have_begun_{false};  // a refused launch may still have begun

  std::atomic<bool> finalized_{false};  // a launch that begins after it is set launches nothing

  Mutex launch_mutex_;  // held during a launch in the driver, which may block
  StreamsInUse streams_ GUARDED_BY(launch_mutex_);
  LaunchBatch batch_ GUARDED_BY(launch_mutex_);

  mutable Mutex signals_mutex_;                                            // held during a launch of signals
  std::map<void*, kernel::TailEvent> signals_ GUARDED_BY(signals_mutex_);  // by stream, behind its last signals

  Mutex mutex_;  // never held during a wait
  Status failure_ GUARDED_BY(mutex_);
  std::vector<Call> calls_ GUARDED_BY(mutex_);  // a ring, by the count of launches
  std::vector<Call> captured_calls_ GUARDED_BY(mutex_);
};

}  // namespace nvx
