#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "torch/delegate_setup.h"
#include "torch/origin.h"
#include "torch/work.h"

namespace nvx {

/// Some collectives of a device's tensors, carried out by a backend of torch's own, NCCL: those that NVX_DELEGATE
/// names, where it can serve all ranks of the group.
///
/// It is used as kernels are. A call begins the collective on a stream that nvx chooses, behind all else that this
/// group has begun on the device, in the order of the calls, which is that of all ranks: so of two that wait for each
/// other's peers, NCCL's and nvx's, no rank has the second before the first, on whatever streams they were called. The
/// host does not wait, and does not run what its watchdog would do: that is done here.
///
/// Before each, the ranks meet on the host, beside the device: a barrier with its fingerprint in the order of the
/// collectives that go through host memory. So who calls something else, or does not come, is named as ever, while
/// what was begun waits on the device until it is called off. That meeting has the call's timeout, and so, from when
/// the device comes to it, has what was handed over.
///
/// None of that can be done for a replay of a graph, which no host takes part in. So nothing that is captured is handed
/// over: it stays with nvx's kernels, which look after themselves.
class Delegate : public std::enable_shared_from_this<Delegate> {
 public:
  using GroupOfDevices = std::function<std::shared_ptr<Group>()>;
  /// group: fails with what fails here. of_devices: makes, or gives, the one of collectives through host memory.
  Delegate(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store, GroupOfDevices of_devices);
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  /// Whether it carries this collective out, which has a type and an operator by now, on this thread's current stream.
  /// The first that it may carry out is a step of all ranks together. bytes: of the whole.
  bool agree_to_serve(const TensorOperation& collective, size_t bytes) EXCLUDES(asking_);

  /// What the first of them would do, before any is called: a step of all ranks together.
  void connect(at::Device device) EXCLUDES(asking_) {
    if (answer_ == Answer::kUnknown) ask(device);
  }

  /// Begins one on the stream, which is the current one. As Group::launch().
  Status begin(TensorOperation& collective, const c10::Stream& stream) EXCLUDES(mutex_);

  /// Ends what is in flight, within a moment. From any thread, at any time.
  void abort() EXCLUDES(mutex_);
  /// Waits for what is in flight, for a bounded time, and then calls it off. Nothing is begun any more. Before the
  /// group's goodbye: until then this looks at its peers.
  void part() EXCLUDES(mutex_);

 private:
  /// What the ranks meet in.
  class HostBarrier;
  struct Flight {
    explicit Flight(at::DeviceType device) : begun(device), ended(device) {}
    /// Whether it has ended well, here and as far as the others have said so. Throws what the device does.
    bool over() const;
    c10::Event begun, ended;
    std::atomic<bool> enqueued{false};  ///< ended has been recorded
    bool seen = false;                  ///< the device has come to it; its time runs from then on
    Deadline deadline;
    std::chrono::milliseconds timeout{0};
    std::string what;  ///< "all_reduce(sum, f32, 1024 elements) #7"
    std::shared_ptr<HostBarrier> barrier;
  };
  enum class Answer { kUnknown, kYes, kNo };

  void ask(at::Device device) EXCLUDES(asking_);
  void say(const std::string& why_not) const;
  Status begin(const std::shared_ptr<Flight>& flight, const Operation& o, const c10::Stream& stream) EXCLUDES(mutex_);
  void watch() REQUIRES(mutex_);
  bool keeps_watching() EXCLUDES(mutex_);
  /// Whether nothing is in flight.
  bool clear() REQUIRES(mutex_);
  Status look_at_flights() EXCLUDES(mutex_);
  Status look() EXCLUDES(mutex_);
  Status look_at_first() EXCLUDES(mutex_);
  /// Whether nothing was in flight any more, when it was called or within the time.
  bool settle(const Deadline& deadline) EXCLUDES(mutex_);
  Status fail(Code code, const std::string& cause, const std::string& context = "");
  void call_off();
  std::string self() const { return group_->topology().describe(group_->rank()); }

  const Origin origin_;
  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOfDevices of_devices_;
  Mutex asking_;
  std::atomic<Answer> answer_{Answer::kUnknown};
  // Written before the answer is.
  at::Device device_{at::kCPU};
  std::shared_ptr<Group> lane_group_;
  c10::intrusive_ptr<c10d::Backend> backend_;

  std::atomic<bool> called_off_{false};
  Mutex mutex_;  // never held while anything is waited for
  bool parted_ GUARDED_BY(mutex_) = false;
  bool watched_ GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Flight>> flights_ GUARDED_BY(mutex_);
};

}  // namespace nvx
