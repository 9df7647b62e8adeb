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
#include "torch/call/coalescing.h"
#include "torch/call/work.h"
#include "torch/core/agree_once.h"
#include "torch/core/origin.h"
#include "torch/device/delegate_setup.h"

namespace nvx {

/// Runs some collectives and messages of a device's tensors on another torch backend, NCCL. NVX_DELEGATE names them.
/// They are delegated only if that backend can serve all ranks of the group.
/// A call enqueues the collective on a stream that nvx chooses, after all other work of this group on the device, as
/// for kernels. That is the order of the calls, which is the same on all ranks. Therefore a collective of NCCL and one
/// of nvx cannot deadlock, on any streams: no rank begins the second before the first. The host
/// does not wait. NCCL's watchdog is off, because this class does its work.
/// For each such collective the ranks also run a barrier on the host. The barrier carries the collective's fingerprint
/// and its number among the collectives that go through host memory. Therefore the error names a rank that calls
/// another collective or does not arrive, while the enqueued collective waits on the device until it is aborted. The
/// barrier has the call's timeout. The collective has the same timeout again, from when the device reaches it.
/// Messages run in the same order, so a message waits for earlier collectives of its rank, as in a group of NCCL with a
/// `device_id`. NCCL matches messages of a pair by their order and ignores tags. Therefore each message also sends a
/// note through the mailbox, under its tag: both ranks must have the same number of earlier delegated messages, or the
/// error names them. In a batch the messages are sorted by tag first, so there the tags match.
/// A replay of a graph runs no host code, so none of this is possible there. Therefore captured collectives are never
/// delegated: nvx's kernels run them, with timeouts of their own.
class Delegate : public std::enable_shared_from_this<Delegate> {
 public:
  using GroupOfDevices = std::function<std::shared_ptr<Group>()>;
  /// group: fails if a delegated collective fails. of_devices: returns the group of collectives through host memory,
  /// and makes it if needed.
  Delegate(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store, GroupOfDevices of_devices)
      : group_(std::move(group)), store_(std::move(store)), of_devices_(std::move(of_devices)) {}
  ~Delegate();

  /// Whether the delegate runs this collective on this thread's current stream. Type and operator must be set. May be a
  /// collective call: the first call for a collective that NVX_DELEGATE names connects the ranks. bytes: of the whole
  /// collective.
  bool agree_to_serve(const TensorOperation& collective, size_t bytes);

  /// The same for a message. Raises for a tensor of another device than before.
  bool agree_to_serve(at::Device device, size_t bytes);

  /// A collective call: connects the ranks now, as the first delegated collective would.
  void connect(at::Device device) {
    (void)connected_.agree(device, [&] { return set_up(device); });
  }

  /// Enqueues a collective on the stream, which must be the current one. Returns the same as Group::launch().
  Status begin(TensorOperation& collective, const c10::Stream& stream) EXCLUDES(mutex_);
  /// The same for the messages of one batch, which NCCL gets as one group. Their order in the batch does not matter.
  /// earlier: this rank's sends through host memory that wait for their streams.
  Status begin(DelegatedMessages batch, PendingSends& earlier, const c10::Stream& stream) EXCLUDES(mutex_);

  /// Aborts the collectives in flight, within a moment. May be called from any thread, at any time.
  void abort() EXCLUDES(mutex_) {
    if (connected_.is_yes()) cancel();
  }
  /// Waits a bounded time for the collectives in flight, then aborts them. No collective begins afterwards. Call it
  /// before the group leaves: the group monitors its peers only until then.
  void finalize() EXCLUDES(mutex_);

 private:
  /// The part of a call between the hosts of its ranks.
  struct HostPart {
    virtual ~HostPart() = default;
    virtual bool is_over() const = 0;
    virtual Status outcome() const = 0;  ///< once it is over
  };
  class HostBarrier;  ///< of all ranks, for a collective
  class Notes;        ///< of the two ranks of each message
  struct Flight {
    explicit Flight(at::DeviceType device) : begun(device), ended(device) {}
    /// Whether the call has succeeded, on this device and between the hosts. Throws the device's error.
    bool over() const;
    c10::Event begun, ended;
    std::atomic<bool> enqueued{false};  ///< `ended` has been recorded
    bool seen = false;                  ///< the device has reached it; its timeout runs from then on
    Deadline deadline;
    std::chrono::milliseconds timeout{0};
    std::string what;  ///< "all_reduce(sum, f32, 1024 elements) #7"
    std::shared_ptr<HostPart> host_part;
  };
  bool set_up(at::Device device);
  void log_setup(const std::string& why_not) const;
  Status ready();
  /// sync_and_call: begins the host part, and calls the backend.
  Status begin(const std::shared_ptr<Flight>& flight, const c10::Stream& stream,
               const std::function<void()>& sync_and_call) EXCLUDES(mutex_);
  Status enqueue(const std::shared_ptr<Flight>& flight, const c10::Stream& stream,
                 const std::function<void()>& sync_and_call) EXCLUDES(mutex_);
  /// Raises for another device than before.
  bool connected_on(at::Device device);
  bool poll() EXCLUDES(mutex_);
  bool clear() REQUIRES(mutex_);
  Status check_flights() EXCLUDES(mutex_);
  Status check() EXCLUDES(mutex_);
  Status check_first_flight() EXCLUDES(mutex_);
  Status fail(const Failure& failure);
  void cancel();
  std::string self() const { return group_->topology().describe(group_->rank()); }

  const Origin origin_;
  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const GroupOfDevices of_devices_;
  AgreeOnce connected_;
  // AgreeOnce publishes these four to all threads of this rank: they are written before `connected_` has an answer.
  at::Device device_{at::kCPU};
  std::shared_ptr<Group> lane_group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::shared_ptr<Poller> watcher_;  // polls the collectives in flight

  std::atomic<bool> cancelled_{false};
  Mutex mutex_;  // never held during a wait
  bool finalized_ GUARDED_BY(mutex_) = false;
  std::deque<std::shared_ptr<Flight>> flights_ GUARDED_BY(mutex_);
  std::vector<uint64_t> sent_ GUARDED_BY(mutex_), received_ GUARDED_BY(mutex_);  // messages so far, by peer
};

}  // namespace nvx
