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
#include "group/core/poller.h"
#include "torch/core/ask_once.h"
#include "torch/core/origin.h"
#include "torch/device/delegate_setup.h"
#include "torch/work.h"

namespace nvx {

/// Has a backend of torch's own, NCCL, carry out some collectives of a device's tensors: those that NVX_DELEGATE names,
/// where that backend can serve all ranks of the group.
///
/// It is used as kernels are. A call begins the collective on a stream that nvx chooses, behind everything else that
/// this group has begun on the device. That is the order of the calls, which is the same on all ranks. So a collective
/// of NCCL and one of nvx cannot wait for each other crosswise, whatever streams they were called on: no rank begins
/// the second before the first. The host does not wait. NCCL's watchdog is off: its work is
/// done here.
///
/// Beside each such collective the ranks meet on the host, in a barrier that has the collective's fingerprint and its
/// place in the order of those that go through host memory. So a rank that calls something else, or does not come, is
/// named as ever, while what was begun waits on the device until it is called off. The barrier has the call's timeout.
/// The collective has the same timeout again, from when the device comes to it.
///
/// None of that can be done for a replay of a graph, in which no host takes part. So nothing that is captured is
/// delegated: it stays with nvx's kernels, which look after themselves.
class Delegate : public std::enable_shared_from_this<Delegate> {
 public:
  using GroupOfDevices = std::function<std::shared_ptr<Group>()>;
  /// group: fails with what fails here. of_devices: gives the group of collectives through host memory, or makes it.
  Delegate(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store, GroupOfDevices of_devices);
  ~Delegate();
  Delegate(const Delegate&) = delete;
  Delegate& operator=(const Delegate&) = delete;

  /// Whether it carries this collective out on this thread's current stream; type and operator must be known. May be a
  /// step of all ranks: the first call for a collective that NVX_DELEGATE names connects them. bytes: of the whole.
  bool agree_to_serve(const TensorOperation& collective, size_t bytes);

  /// A step of all ranks: connects them now, as the first such collective would.
  void connect(at::Device device);

  /// Begins a collective on the stream, which is the current one. Returns the same as Group::launch().
  Status begin(TensorOperation& collective, const c10::Stream& stream) EXCLUDES(mutex_);

  /// Ends what is in flight, within a moment. From any thread, at any time.
  void abort() EXCLUDES(mutex_);
  /// Waits for what is in flight, for a bounded time, and then calls it off. Nothing is begun any more. To be called
  /// before the group leaves: while it is there, its peers are looked at.
  void part() EXCLUDES(mutex_);

 private:
  /// In which the ranks meet on the host.
  class HostBarrier;
  struct Flight {
    explicit Flight(at::DeviceType device) : begun(device), ended(device) {}
    /// Whether it has ended well on this device, and all ranks have come to its barrier. Throws what the device throws.
    bool over() const;
    c10::Event begun, ended;
    std::atomic<bool> enqueued{false};  ///< ended has been recorded
    bool seen = false;                  ///< the device has come to it; its time runs from then on
    Deadline deadline;
    std::chrono::milliseconds timeout{0};
    std::string what;  ///< "all_reduce(sum, f32, 1024 elements) #7"
    std::shared_ptr<HostBarrier> barrier;
  };
  bool ask(at::Device device);
  void say(const std::string& why_not) const;
  Status begin(const std::shared_ptr<Flight>& flight, const Operation& o, const c10::Stream& stream) EXCLUDES(mutex_);
  bool needs_watching() EXCLUDES(mutex_);
  /// Whether nothing is in flight.
  bool clear() REQUIRES(mutex_);
  Status look_at_flights() EXCLUDES(mutex_);
  Status look() EXCLUDES(mutex_);
  Status look_at_first() EXCLUDES(mutex_);
  /// Waits until nothing is in flight; false if that is not so by the deadline.
  bool settle(const Deadline& deadline) EXCLUDES(mutex_);
  Status fail(const Failure& failure);
  void call_off();
  std::string self() const { return group_->topology().describe(group_->rank()); }

  const Origin origin_;
  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOfDevices of_devices_;
  AskOnce connected_;
  // These four are written before connected_ is answered.
  at::Device device_{at::kCPU};
  std::shared_ptr<Group> lane_group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<Poller> watcher_;  // of what is in flight

  std::atomic<bool> called_off_{false};
  Mutex mutex_;  // never held while anything is waited for
  bool parted_ GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Flight>> flights_ GUARDED_BY(mutex_);
};

}  // namespace nvx
