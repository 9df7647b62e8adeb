#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "group/device/device_launcher.h"
#include "kernel/gpu/capture.h"
#include "torch/ask_once.h"
#include "torch/device/shared_streams.h"
#include "torch/work.h"

namespace nvx {

/// The type of device that nvx has kernels for. It is defined in a file of its own, as tests play kernels on another
/// device.
at::DeviceType kernel_device();

/// Raises that kernels of a group run on one device of each rank, served, and not on device.
[[noreturn]] void refuse_other_device(const Group& group, at::Device served, at::Device device);

/// Raises if this thread's current stream is in a capture, as devices are opened outside of those.
void refuse_to_open(const Group& group, at::Device device);

/// Launches kernels by CUDA, and keeps those of a group in order: it knows where kernels were launched last, and has
/// another stream wait for those before any are launched on it.
class StreamLauncher final : public Launcher {
 public:
  /// Where kernels are launched: a stream, its native handle, and the capture that it is in; 0: none.
  struct Target {
    c10::Stream stream;
    void* native;
    uint64_t capture;
  };
  /// To be called before kernels are launched there: has the target wait for those launched elsewhere. And after.
  Status follow(const Target& target) EXCLUDES(mutex_);
  Status note(const Target& target) EXCLUDES(mutex_);
  /// Both, and `begin` between them.
  template <class Begin>
  Status in_order(const Target& target, const Begin& begin) {
    NVX_TRY(follow(target));
    const Status status = begin();
    const Status noted = note(target);  // also where it was refused: part of it may have been begun
    NVX_TRY(status);
    return noted;
  }
  /// Whether anything has been captured, and so may be replayed at any time.
  bool has_graphs() EXCLUDES(mutex_);
  Status launch(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                std::span<const kernel::Piece> table, void* stream) override {
    return cuda_->launch(channel, jobs, table, stream);
  }
  Status facts(std::vector<kernel::KernelFacts>* facts) override { return cuda_->facts(facts); }
  bool ended() override EXCLUDES(mutex_);
  bool replays_ended() override { return ended(); }

  std::atomic<bool> gave_up{false};  ///< somebody has waited in vain for its kernels to end

 private:
  /// Has the target wait for what was launched last; notes that what it has been given now is what was launched last.
  Status hold_back(const Target& target) REQUIRES(mutex_);
  Status put_behind(const Target& target) REQUIRES(mutex_);

  const std::shared_ptr<Launcher> cuda_ = cuda_launcher();
  Mutex mutex_;
  kernel::Tail tail_ GUARDED_BY(mutex_);                  // what was launched last, where there are kernels
  std::optional<c10::Event> last_ GUARDED_BY(mutex_);     // the same where there are none: see may_have_kernels()
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);  // that of the last launch that was not captured
  bool has_graphs_ GUARDED_BY(mutex_) = false;
  /// The capture under way, or the last one. Its launches follow each other inside it.
  struct Capture {
    uint64_t id = 0;
    std::optional<c10::Event> last;
    std::optional<c10::Stream> stream;
  };
  Capture capture_ GUARDED_BY(mutex_);
};

class LaunchedWork;

/// Carries out a group's collectives by kernels on streams, where all its ranks can have that.
class KernelPath {
 public:
  using Target = StreamLauncher::Target;

  KernelPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store)
      : group_(std::move(group)), store_(std::move(store)) {}

  /// Whether kernels serve tensors of this device. May be a step of all ranks: the first call opens the device on all
  /// of them. Raises if another device of this rank is served.
  bool agree_to_serve(at::Device device);

  /// The same of the device of this number, as far as it is known without asking the other ranks.
  bool may_serve(c10::DeviceIndex device) const;

  /// Begins collectives on the stream of the staging, behind what was begun on other streams and what was put off. The
  /// host waits for nothing. ended_at: gets the number that GroupDevice::ended_well() takes for these; it stays 0 in
  /// captures, where nobody counts.
  Status launch(TensorOperations& collectives, StagingCopies& staging, uint64_t* ended_at) EXCLUDES(mutex_);
  /// The same, but begin_them() begins them. The stream is the current one meanwhile.
  using Begin = std::function<Status(TensorOperations&, const Target&)>;
  Status launch(TensorOperations& collectives, StagingCopies& staging, const Begin& begin_them) EXCLUDES(mutex_);
  /// Keeps the work's collectives back, so that they share launches with those that are put off next. They must have
  /// numbers, and their stream must have been claimed. They begin when they fill a launch, before anything else of the
  /// group does, or in catch_up().
  void put_off(c10::intrusive_ptr<LaunchedWork> work) EXCLUDES(mutex_);
  /// Begins what was put off. Returns when that has been done, by this thread or by another.
  void catch_up() EXCLUDES(mutex_);
  void catch_up_if_behind() EXCLUDES(mutex_) {
    if (behind_.load(std::memory_order_acquire)) catch_up();
  }

  /// Raises if what is called next would come, on this thread's current stream, behind another rank's part of the same
  /// collective. Claim::keep() is to be called once it has begun.
  [[nodiscard]] SharedStreams::Claim claim_stream(const StagingCopies& staging) const;
  /// Notes that this thread's current stream waits for the collective of that number.
  void note_wait(const StagingCopies& staging, uint64_t number) const;

 private:
  using Works = std::vector<c10::intrusive_ptr<LaunchedWork>>;
  using Operations = c10::SmallVector<const Operation*, kernel::kLaunchJobs>;
  /// Begins what was put off, and returns the works, which are to be told when the mutex has been let go.
  Works begin_what_waits() REQUIRES(mutex_);
  using BeginThere = std::function<Status(const Target&)>;
  Status begin(const StagingCopies& staging, const BeginThere& begin_there) REQUIRES(mutex_);
  Status launch_kernels(const Operations& operations, const Target& target);
  static void tell(const Works& begun);
  /// A step of all ranks: opens the device on all of them, or on none.
  bool open(at::Device device);

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  AskOnce served_;
  std::shared_ptr<SharedStreams> shared_;  // set before served_ is answered
  const std::shared_ptr<StreamLauncher> launcher_ = std::make_shared<StreamLauncher>();
  Mutex mutex_;                       // held while operations are launched, as all ranks launch them in one order
  Works put_off_ GUARDED_BY(mutex_);  // all have the same stream, capture and timeout
  std::atomic<bool> behind_{false};   // something is put off
};

/// Collectives that kernels, or a delegate, carry out. The work has ended when they have been begun, or captured, and
/// wait() has the caller's stream wait for them.
class LaunchedWork final : public NvxWork {
 public:
  LaunchedWork(std::shared_ptr<KernelPath> path, std::shared_ptr<Group> group, Facts facts,
               std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded,
               std::unique_ptr<StagingCopies> staging);
  /// For collectives that have been begun. ended_at: from KernelPath::launch(). Not in the constructor, because hooks
  /// keep the work until they have been told.
  void begin(uint64_t ended_at) {
    ended_at_ = ended_at;
    end({}, Hooks::kWhenThere);
  }
  /// For collectives that are put off: whoever asks anything of this work has them begun. used: all their tensors.
  void put_off(TensorOperations collectives, std::vector<at::Tensor> used);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  Status failure() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  void abort() override;

 private:
  friend class KernelPath;
  void catch_up();
  void wait_there(std::chrono::milliseconds timeout);
  void close(const Status& outcome, uint64_t ended_at);
  bool has_ended_well() const;
  void tell_outcome();

  const std::shared_ptr<KernelPath> path_;
  const std::shared_ptr<Group> group_;
  TensorOperations collectives_;  // what was put off; this and used_ belong to the path until it has begun them
  std::vector<at::Tensor> used_;
  Status outcome_;                  // this and ended_at_ are written before closed_
  uint64_t ended_at_ = 0;           // as for KernelPath::launch()
  std::atomic<bool> closed_{true};  // the collectives have been begun, or could not be
};

}  // namespace nvx
