#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "group/device_launcher.h"
#include "kernel/capture.h"
#include "torch/shared_streams.h"
#include "torch/work.h"

namespace nvx {

/// Whose kernels nvx has. In a file of its own, as tests play them on another device.
at::DeviceType kernel_device();

/// Kernels of a group run on one device of each rank.
[[noreturn]] void refuse_other_device(const Group& group, c10::DeviceIndex served, at::Device device);

/// CUDA's, which knows where kernels were launched last: behind all others of its group.
class StreamLauncher final : public Launcher {
 public:
  /// Where kernels are launched: a stream, its native handle, and the capture that it is in, if any.
  struct Target {
    c10::Stream stream;
    void* native;
    uint64_t capture;
  };
  /// Before kernels are launched there, and after.
  Status follow(const Target& target) EXCLUDES(mutex_);
  Status note(const Target& target) EXCLUDES(mutex_);
  Status launch(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                std::span<const kernel::Piece> table, void* stream) override {
    return cuda_->launch(channel, jobs, table, stream);
  }
  Status facts(std::vector<kernel::KernelFacts>* facts) override { return cuda_->facts(facts); }
  bool ended() override EXCLUDES(mutex_);
  bool replays_ended() override { return ended(); }

 private:
  /// The stream waits for what was launched last, and that is now what it has been given.
  Status hold_back(const Target& target) REQUIRES(mutex_);
  Status put_behind(const Target& target) REQUIRES(mutex_);

  const std::shared_ptr<Launcher> cuda_ = cuda_launcher();
  Mutex mutex_;
  kernel::Tail tail_ GUARDED_BY(mutex_);                  // where there are kernels
  std::optional<c10::Event> last_ GUARDED_BY(mutex_);     // where there are none
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);  // of the last launch that was not captured
  bool has_graphs_ GUARDED_BY(mutex_) = false;
  /// The capture under way, or the last one: its launches follow each other inside it.
  struct Capture {
    uint64_t id = 0;
    std::optional<c10::Event> last;
    std::optional<c10::Stream> stream;
  };
  Capture capture_ GUARDED_BY(mutex_);
};

class LaunchedWork;

/// A group's collectives as kernels on streams, where all its ranks can have that.
class KernelPath {
 public:
  using Target = StreamLauncher::Target;

  KernelPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store)
      : group_(std::move(group)), store_(std::move(store)) {}

  /// Whether kernels serve tensors of this device. The first question about one is a step of all ranks together.
  bool agree_to_serve(at::Device device);

  /// Whether they may serve tensors of the device of this number, as far as that is known without the other ranks.
  bool may_serve(c10::DeviceIndex device) const;

  /// Begins collectives on the stream of the transit, behind what was begun on another one and what was put off.
  /// Nothing is waited for.
  /// ended_at: where Group::kernels_ended_well() says that these have; 0 where it cannot, as in captures.
  Status launch(TensorOperations& collectives, Transit& transit, uint64_t* ended_at) EXCLUDES(mutex_);
  /// The same, whoever begins them on the stream, which is the current one then.
  using Begin = std::function<Status(TensorOperations&, const Target&)>;
  Status launch(TensorOperations& collectives, Transit& transit, const Begin& begin_them) EXCLUDES(mutex_);
  /// Keeps collectives back, which are numbered and whose call has been noted, to share launches with those that are
  /// put off next. They begin before anything else of the group does, when they fill a launch, or by catch_up().
  void put_off(c10::intrusive_ptr<LaunchedWork> work) EXCLUDES(mutex_);
  /// Begins what was put off; returns when this has been done, by whomever.
  void catch_up() EXCLUDES(mutex_);
  bool is_behind() const { return behind_.load(std::memory_order_acquire); }

  /// Raises where what is called next would be behind another rank's part of it, on this thread's current stream. The
  /// claim is kept once it begins.
  [[nodiscard]] SharedStreams::Claim claim_stream(const Transit& transit) const;
  /// This thread's current stream has come to wait for that collective.
  void note_wait(const Transit& transit, uint64_t number) const;

 private:
  using Works = std::vector<c10::intrusive_ptr<LaunchedWork>>;
  using Operations = c10::SmallVector<const Operation*, kernel::kLaunchJobs>;
  enum class Answer { kUnknown, kYes, kNo };
  Works begin_what_waits() REQUIRES(mutex_);
  using BeginThere = std::function<Status(const Target&)>;
  Status begin(const Transit& transit, const BeginThere& begin_there) REQUIRES(mutex_);
  Status launch_kernels(const Operations& operations, const Target& target);
  static void tell(const Works& begun);
  void ask(at::Device device) EXCLUDES(asking_);
  void refuse_to_open(at::Device device) const;

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  Mutex asking_;
  std::atomic<Answer> answer_{Answer::kUnknown};
  std::atomic<c10::DeviceIndex> device_{-1};
  std::shared_ptr<SharedStreams> shared_;  // set before the answer is
  const std::shared_ptr<StreamLauncher> launcher_ = std::make_shared<StreamLauncher>();
  Mutex mutex_;                       // held while operations are launched, which all ranks do in one order
  Works put_off_ GUARDED_BY(mutex_);  // of one stream, capture and timeout
  std::atomic<bool> behind_{false};   // there are some
};

/// Collectives that kernels carry out: it is over when they have been begun, or captured, and who waits for it has
/// a stream wait.
class LaunchedWork final : public NvxWork {
 public:
  LaunchedWork(std::shared_ptr<KernelPath> path, std::shared_ptr<Group> group, Facts facts,
               std::vector<at::Tensor> outputs, std::unique_ptr<Transit> transit);
  /// That were begun, and where they have ended, as KernelPath::launch() says it; apart from the constructor because
  /// hooks keep it until they have been told.
  void begin(uint64_t ended_at) {
    ended_at_ = ended_at;
    end({}, Hooks::kWhenThere);
  }
  /// That are put off: whoever asks for it has them begun. used: all their tensors.
  void put_off(TensorOperations collectives, std::vector<at::Tensor> used);

  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
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
  TensorOperations collectives_;  // of what was put off; these two are the path's until it has begun them
  std::vector<at::Tensor> used_;
  Status outcome_;                  // these two are written before closed_
  uint64_t ended_at_ = 0;           // 0: nobody counts it
  std::atomic<bool> closed_{true};  // they have been begun, or could not be
};

}  // namespace nvx
