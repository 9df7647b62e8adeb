#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "group/core/diagnosis.h"
#include "group/device/device_end.h"
#include "group/device/launch_batch.h"
#include "group/device/stream_order.h"
#include "group/plan/device_plan.h"
#include "group/plan/operation.h"

namespace nvx {

/// What one rank does of a group's collectives on GPUs: operations become kernels on the caller's streams, in the order
/// of the calls to launch(), which is the same on all ranks; so is that of replays among them. Kernels of one channel
/// must not overlap: whoever changes the stream, or replays a graph, chains it behind the last one. The first failure
/// stays.
class DeviceSide {
 public:
  /// A step of all ranks together, on a thread whose current device is this rank's. Throws Error, and then on all ranks
  /// unless one has ended.
  DeviceSide(DeviceHome& home, Exchange& exchange, const DeviceSideOptions& options,
             std::shared_ptr<kernel::KernelLauncher> launcher, std::shared_ptr<StreamOrder> order);
  /// Local.
  ~DeviceSide();
  DeviceSide(const DeviceSide&) = delete;
  DeviceSide& operator=(const DeviceSide&) = delete;

  /// Begins operations, one after the other, whose pointers are addresses of this rank's device; they must stay as they
  /// are until the stream has come past. timeout: of each that has none of its own; 0: none. Nothing is waited for, and
  /// nothing allocated where nothing has failed. Refused as kInvalid, nothing has begun and the group is as it was;
  /// refused otherwise, the group has failed. In a capture, what is here is what each replay does, with this timeout.
  /// tells: when all have ended well.
  Status launch(std::span<const Operation* const> operations, const LaunchStream& stream,
                std::chrono::milliseconds timeout, const Tells& tells = {}) EXCLUDES(launch_mutex_, mutex_);

  /// What has gone wrong first, ok where nothing has: a look at the host's memory, for before every launch. From any
  /// thread.
  Status verdict() EXCLUDES(mutex_);

  /// Operations begun, ever, and those that have ended well on the device, as far as it has told, which it does once a
  /// launch. Counted from the options' first_epoch. Replays count as neither.
  uint64_t launched() const { return launched_.load(std::memory_order_acquire); }
  uint64_t finished() const;
  /// As the device counts them, replays too, in 32 bits, which wrap: the last operation that it has begun, and the last
  /// that it has ended well. Told as for finished().
  uint32_t begun_epoch() const;
  uint32_t ended_epoch() const;
  /// Pieces that have gone to a peer or come from it without staging, ever; told as for finished(), and wraps.
  uint32_t direct() const;
  /// Whether there may be graphs that hold operations of it, which nobody says when they run.
  bool may_be_replayed() const { return captured_.load(std::memory_order_acquire) != 0 && !parted_; }

  /// Whether no kernel of this rank can be running, as far as that can be known.
  bool settled() const;

  /// What carries an operation out.
  DeviceChoice choose(const Operation& operation) const;

  /// Begins nothing any more. Waits for kernels that have not ended, as long as the options' farewell; then they are
  /// called off, and all that they may still write to stays until the process ends, as it does where there may be
  /// graphs: what they replay from then on does nothing. True where all has ended: only then may this rank tell the
  /// others that it has left.
  bool part() EXCLUDES(launch_mutex_);

  /// Ends what is in flight here, within a moment, and refuses what comes, for this reason where nothing has failed
  /// before. From any thread, at any time.
  void abort(const Status& why = {}) EXCLUDES(mutex_);

  const kernel::DeviceShape& shape() const { return end_.channel().shape; }
  const DeviceEnd& end() const { return end_; }

 private:
  /// What has been begun, for whoever must explain it. Large enough for what a stream holds back.
  struct Call {
    uint64_t epoch = 0;  ///< how many had been launched with it
    uint64_t number = 0;
    kernel::Fingerprint fingerprint;
    std::chrono::milliseconds timeout{0};
  };
  static constexpr size_t kCalls = 4096;
  /// In what jobs are known by: set, the rest is an index of those captured; else it is of the count of those launched.
  static constexpr uint32_t kCaptured = uint32_t(1) << 31;
  static uint32_t call_of(uint64_t epoch) { return uint32_t(epoch) & ~kCaptured; }

  Status launch_batches(std::span<const Operation* const> operations, const LaunchStream& stream,
                        std::chrono::milliseconds timeout, const Tells& tells) REQUIRES(launch_mutex_) EXCLUDES(mutex_);
  uint32_t next_call(Begins begins) const;
  size_t gather(std::span<const Operation* const> operations, std::chrono::milliseconds timeout, uint32_t call)
      REQUIRES(launch_mutex_);
  kernel::Job job_of(const Operation& operation, kernel::Piece* room, std::chrono::milliseconds timeout)
      REQUIRES(launch_mutex_);
  Status refused(const Status& status, Begins begins, bool is_first) EXCLUDES(mutex_);
  Status not_captured(const Status& status) const;
  void remember(std::span<const Operation* const> operations, std::chrono::milliseconds timeout, Begins begins)
      EXCLUDES(mutex_);
  Status fail(const Status& status) REQUIRES(mutex_);
  bool has_verdict() const;
  bool await_end(std::chrono::milliseconds most) EXCLUDES(launch_mutex_);
  Status explain(const kernel::DeviceVerdict& verdict) REQUIRES(mutex_);
  Status explain_abort() REQUIRES(mutex_);
  Failure mismatch(const kernel::DeviceVerdict& verdict, const std::string& context) const REQUIRES(mutex_);
  const Call* find(uint32_t call) const REQUIRES(mutex_);
  std::string what_was(uint32_t call, uint32_t epoch) const REQUIRES(mutex_);
  std::string what_was_at(uint32_t epoch) const REQUIRES(mutex_);
  std::string self() const { return diagnosis_.self(); }

  const std::shared_ptr<kernel::KernelLauncher> launcher_;
  const std::shared_ptr<StreamOrder> order_;
  DeviceEnd end_;
  const DevicePlanFacts facts_;
  const Diagnosis diagnosis_;
  std::atomic<uint64_t> launched_;
  std::atomic<uint32_t> captured_{0};  // operations, ever
  std::atomic<bool> failed_{false};
  std::atomic<bool> unsure_{false};  // whether a launch that was refused has begun all the same

  std::atomic<bool> parted_{false};  // what begins a launch after it is set begins nothing

  Mutex launch_mutex_;  // held while the driver takes a launch, which it may do late
  LaunchBatch batch_ GUARDED_BY(launch_mutex_);

  Mutex mutex_;  // never held while anything is waited for
  Status failure_ GUARDED_BY(mutex_);
  std::vector<Call> calls_ GUARDED_BY(mutex_);  // by the count of those launched
  std::vector<Call> captured_calls_ GUARDED_BY(mutex_);
};

}  // namespace nvx
