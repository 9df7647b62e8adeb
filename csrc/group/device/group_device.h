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
#include "group/meet/store.h"
#include "group/plan/operation.h"

namespace nvx {

class DeviceSide;
class Launcher;
struct Core;
struct Members;
struct PoolStats;

/// What a group does on GPUs, from one of its ranks: how the ranks of each host open theirs together, what is begun
/// there, and who looks after it while nobody waits. What goes wrong with it fails the group. Until it is opened there
/// are no kernels; once that has come about, it stays.
class GroupDevice {
 public:
  explicit GroupDevice(Core& core);
  ~GroupDevice();
  GroupDevice(const GroupDevice&) = delete;
  GroupDevice& operator=(const GroupDevice&) = delete;

  /// Makes this rank's end of what the ranks of its host do on GPUs among themselves, if that has not been tried: a
  /// step of all ranks of the group together, on a thread whose current device this is. True if there are kernels for
  /// that on all ranks; else tensors go through host memory, on all alike, and the log says why. launcher: who knows
  /// the device's streams.
  bool open(Store& store, int device, const std::shared_ptr<Launcher>& launcher) EXCLUDES(mutex_);
  /// Whether all ranks have come here, to open their devices before anything is called: those that were told which one.
  /// Where some do not come for a while a warning names them, and the answer is no for all, also for those who come
  /// later: the first collective opens then. why_not: this rank cannot; it and all who wait throw Error.
  bool meet_to_connect(Store& store, const std::string& why_not);

  /// Begins operations on the device that was opened, as DeviceSide::launch(): of this host's ranks, by local_rank.
  /// They share the timeout of the first.
  Status launch(std::span<const Operation* const> operations, void* stream, Begins begins = Begins::kNow,
                const Tells& tells = {});
  /// Fails the group if a kernel has given up. A look at memory; ok where there are none.
  Status look();
  /// Operations that kernels have been given, ever; and whether the device has ended the first so many of them well, as
  /// far as it has told. Those of graphs do not count.
  uint64_t launched() const;
  bool ended_well(uint64_t launched) const;
  /// Whether nothing that kernels have been given is under way, replays too.
  bool is_quiet() const;
  /// The algorithm of the kernel that carries an operation out.
  const char* kernel_for(const Operation& operation) const;
  /// What kernels find of the ranks' pools; nothing where there are none.
  std::optional<PoolStats> pool_stats() const;

  /// For the group, which has failed: ends what is in flight here. From any thread, at any time.
  void abort(const Status& why);
  /// For the group, when its rank leaves. True if no kernel of this rank can write to its peers any more.
  bool part();
  /// For the group, before it lets go of its memory.
  void close();
  /// In a forked child, where all of it is the parent's.
  void leave_to_parent();

 private:
  std::unique_ptr<DeviceSide> make_side(Store& store, int device, const std::shared_ptr<Launcher>& launcher);
  void agree_on_sides(Store& store, bool has_one);
  void warn_of_missing(Store& store, const std::string& come, const Deadline& deadline);
  void look_while_waiting(int writer);
  uint64_t pool_of(int local_rank) const;
  DeviceSide* opened() const { return opened_.load(std::memory_order_acquire); }
  void watch();
  bool needs_watching();
  void look_after(DeviceSide& kernels);
  bool waits_in_vain(const DeviceSide& kernels, int local_rank) const;

  Core& core_;
  const Members& members_;
  Mutex mutex_;                               // held while it is opened
  int asked_for_ GUARDED_BY(mutex_) = -1;     // the device that was asked for first
  std::unique_ptr<DeviceSide> side_;          // once made, it stays until the group goes
  std::atomic<DeviceSide*> opened_{nullptr};  // it, when all ranks know of it
  std::atomic<bool> watched_{false};          // a job of the pool looks after the kernels in flight
};

}  // namespace nvx
