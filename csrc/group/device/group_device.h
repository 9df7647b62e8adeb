#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "base/mutex.h"
#include "group/core/poller.h"
#include "group/meet/store.h"
#include "group/plan/operation.h"

namespace nvx {

class DeviceSide;
class StreamOrder;
struct Core;
struct LaunchStream;
struct Members;
struct PoolStats;

/// The GPU side of a group on one of its ranks. The ranks of each host open their devices together; from then on
/// kernels carry out operations, and a thread of the pool looks after them. A failure of it fails the group. Before
/// open() there are no kernels. Once open, it stays open.
class GroupDevice {
 public:
  explicit GroupDevice(Core& core);
  ~GroupDevice();
  GroupDevice(const GroupDevice&) = delete;
  GroupDevice& operator=(const GroupDevice&) = delete;

  /// Opens this rank's device, if that has not been tried. A step of all ranks of the group together, on a thread whose
  /// current device this is. True if all ranks have kernels. Otherwise tensors go through host memory on all ranks, and
  /// the log has the reason. order: keeps the launches on the device's streams in order.
  bool open(Store& store, int device, const std::shared_ptr<StreamOrder>& order) EXCLUDES(mutex_);
  /// Whether all ranks call this, to open the devices that device_id names before the first collective. If some do not
  /// call it in time, a warning names them, and the answer is no for all ranks, also for later ones: then the first
  /// collective opens the devices. why_not: this rank cannot open its device; it and all waiting ranks throw Error.
  bool meet_to_connect(Store& store, const std::string& why_not);

  /// Begins operations on the device that was opened, as DeviceSide::launch(): of this host's ranks, by local_rank.
  /// They share the timeout of the first.
  Status launch(std::span<const Operation* const> operations, const LaunchStream& stream, const Tells& tells = {});
  /// Fails the group if a kernel has given up. A look at memory; ok where there are none.
  Status look();
  /// The number of operations launched so far; and whether the device has ended the first `launched` of them well, as
  /// far as it has told. Operations of graphs do not count.
  uint64_t launched() const;
  bool ended_well(uint64_t launched) const;
  /// Whether no operation is in flight, replays included.
  bool is_quiet() const;
  /// The algorithm by which kernels carry out an operation.
  const char* kernel_for(const Operation& operation) const;
  /// The state of the ranks' pools; empty where there are none.
  std::optional<PoolStats> pool_stats() const;

  /// For the group, when it has failed: ends the operations in flight here. Any thread may call it, at any time.
  void abort(const Status& why);
  /// For the group, when its rank leaves. True if no kernel of this rank can write to its peers any more.
  bool part();
  /// For the group, before it frees its memory.
  void close();
  /// In a forked child: all of it belongs to the parent.
  void leave_to_parent();

 private:
  std::unique_ptr<DeviceSide> make_side(Store& store, int device, const std::shared_ptr<StreamOrder>& order);
  void agree_on_sides(Store& store, bool has_one);
  void warn_of_missing(Store& store, const std::string& come, const Deadline& deadline);
  void look_while_waiting(int writer);
  uint64_t pool_of(int local_rank) const;
  DeviceSide* opened() const { return opened_.load(std::memory_order_acquire); }
  bool needs_watching();
  void look_after(DeviceSide& kernels);
  bool waits_in_vain(const DeviceSide& kernels, int local_rank) const;

  Core& core_;
  const Members& members_;
  Mutex mutex_;                               // held while it is opened
  int asked_for_ GUARDED_BY(mutex_) = -1;     // the device that was asked for first
  std::unique_ptr<DeviceSide> side_;          // once made, it lives as long as the group
  std::atomic<DeviceSide*> opened_{nullptr};  // it, when all ranks know of it
  std::shared_ptr<Poller> watcher_;           // of kernels in flight; made with the side
};

}  // namespace nvx
