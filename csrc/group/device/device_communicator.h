#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/mutex.h"
#include "group/core/poller.h"
#include "group/plan/operation.h"
#include "group/setup/store.h"

namespace nvx {

class DeviceCopies;
class KernelExecutor;
class PeerPool;
class StoreBootstrap;
class StreamOrder;
struct Core;
struct LaunchStream;
namespace kernel {
struct SignalJob;
}
struct Members;
struct PoolStats;

/// The GPU part of a group on one of its ranks. The ranks of each host open their devices together; if the GPUs of all
/// ranks are in one NVLink domain, all ranks do. From then on kernels carry out operations, and a pool thread watches
/// them. A failure of a kernel fails the group. There are no kernels before `open()`. They stay until the group closes.
class DeviceCommunicator {
 public:
  explicit DeviceCommunicator(Core& core);
  ~DeviceCommunicator();

  /// Whether all ranks are on one host, or their GPUs are in one NVLink domain. Then `open()` opens a group of kernels
  /// of all ranks. Otherwise the log has the reason. Collective over all ranks if they are on several hosts. Call it
  /// once, before `open()`, with the same device.
  bool reaches_all(Store& store, int device) EXCLUDES(mutex_);
  /// Opens this rank's device on the first call. Collective over all ranks of the group, on a thread whose current
  /// device is `device`. True if all ranks have kernels. Otherwise tensors go through host memory on all ranks, and the
  /// log has the reason. `order` keeps the launches on the device's streams in order.
  bool open(Store& store, int device, const std::shared_ptr<StreamOrder>& order) EXCLUDES(mutex_);
  /// Waits until all ranks have called this, to open the devices that `device_id` names before the first collective. If
  /// some do not call it in time, a warning names them, and all ranks, also later ones, get false: then the first
  /// collective opens the devices. `why_not`: the reason why this rank cannot open its device; then it and all waiting
  /// ranks throw Error.
  bool agree_to_connect(Store& store, const std::string& why_not);

  /// Launches operations on the opened device: see `KernelExecutor::launch()`. They are indexed by `local_rank`, or by
  /// rank if `reaches_all()`. All have the timeout of the first.
  Status launch(std::span<const Operation* const> operations, const LaunchStream& stream,
                const CompletionFlag& completion = {});
  /// Launches signals of symmetric memory on the opened device. `timeout`: 0 is the group's.
  Status signal(kernel::SignalJob job, const LaunchStream& stream, std::chrono::milliseconds timeout);
  /// Fails the group if a kernel has reported a failure. Reads host memory only; ok if there are no kernels.
  Status check_kernels();
  /// Sends the peers the size of this rank's pool, and maps the new parts of theirs: see `DevicePools`.
  void update_pools();
  /// The numbers of operations launched, and of the first of them that have ended well; without those of graphs.
  uint64_t launched() const;
  uint64_t finished() const;
  /// Whether no operation is in flight, including replays.
  bool is_quiet() const;
  const char* kernel_for(const Operation& operation) const;
  /// Why the link between hosts does not move memory of the opened device; empty if it does. The same on all ranks.
  const std::string& why_no_rdma() const { return why_no_rdma_; }
  /// Allocates memory that it moves, which is freed with the last reference. Throws Error.
  std::shared_ptr<std::byte> allocate_for_rdma(size_t bytes) const;
  std::optional<PoolStats> pool_stats() const;
  /// A peer's pool as this rank maps it; null for this rank, without kernels, and if it is not reachable.
  std::shared_ptr<PeerPool> peer_pool(int local_rank) const;

  /// Called by a failed group: ends the operations in flight here. Any thread may call it, at any time.
  void abort(const Status& why);
  /// Called before the group's port leaves, so that ranks of other hosts do not take the end for a death.
  void announce_leaving();
  /// Called when the group's rank leaves. True if no kernel of this rank can write to its peers any more.
  bool finalize();
  /// Called before the group frees its memory.
  void close();
  /// For a forked child: the parent owns everything here.
  void leave_to_parent();

 private:
  std::unique_ptr<KernelExecutor> make_executor(Store& store, int device, const std::shared_ptr<StreamOrder>& order);
  std::shared_ptr<DeviceCopies> make_copies(const KernelExecutor& executor) const;
  void agree_on_kernels(Store& store, bool has_one);
  void agree_on_rdma(Store& store, int device);
  StoreBootstrap bootstrap_of_all(Store& store, const std::string& what);
  void warn_of_missing(Store& store, const std::string& come, const Deadline& deadline);
  void check_while_waiting(int writer);
  uint64_t pool_of(int local_rank) const;
  KernelExecutor* opened() const { return opened_.load(std::memory_order_acquire); }
  bool poll();
  void check_kernels_and_peers(KernelExecutor& kernels);
  void check_remote_ranks();
  void note_dead_remote_ranks(KernelExecutor& kernels);
  bool spans_hosts() const;
  bool is_remote(int kernel_rank) const;
  int kernel_rank_of(int local_rank) const;
  bool waits_for_missing_rank(const KernelExecutor& kernels, int local_rank) const;

  Core& core_;
  const Members& members_;
  Mutex mutex_;                               // held during `open()`
  std::vector<int> ranks_;                    // that have a group of kernels together; constant once it is open
  int first_device_ GUARDED_BY(mutex_) = -1;  // the device of the first call
  std::unique_ptr<KernelExecutor> executor_;  // lives as long as the group
  std::string why_no_rdma_ = "the ranks are on one host";
  std::atomic<KernelExecutor*> opened_{nullptr};  // set to `executor_` once all ranks have agreed
  std::shared_ptr<Poller> watcher_;               // watches kernels in flight; created with the executor
};

}  // namespace nvx
