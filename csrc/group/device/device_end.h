#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/words.h"
#include "group/device/device_pools.h"
#include "group/device/device_rooms.h"
#include "group/device/device_trial.h"
#include "group/plan/plan.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_share.h"

namespace nvx {

struct DeviceSideOptions {
  std::string group;  ///< its name, for whoever reads what has gone wrong
  int rank = 0;
  int ranks = 1;
  int device = 0;
  uint64_t host = 0;                                    ///< ranks with the same one can pass each other descriptors
  PlanFacts::Force force = PlanFacts::Force::kNothing;  ///< these two: the same on every rank
  size_t one_shot_bytes = 0;
  uint32_t blocks = 16;                      ///< of each rank, where all GPUs have room for them: see device_rooms.h
  uint32_t first_epoch = 0;                  ///< tests begin near the wrap
  std::chrono::milliseconds patience{2000};  ///< with each kind and pair of memory that is tried
  std::chrono::milliseconds farewell{5000};  ///< with kernels that have not ended when this rank goes
  /// Holds when no peer's kernel can write to what this rank has exported. Asked from when this rank has gone, maybe by
  /// other groups' threads; until then that memory is nobody else's.
  std::function<bool()> peers_gone = [] { return false; };
  /// 1 + the offset of so many bytes in the pool of this rank that its peers may map; 0 where they do not lie in it.
  /// Asked at every launch.
  kernel::PlaceOf place_of = [](const std::byte*, size_t) { return 0; };
  PoolNews pool_news = {};
  /// What these ranks are in their group, of which they may be only some; what it calls them: "rank 3"; and "rank 3
  /// (pid 4711, host a01)".
  std::function<int(int rank)> rank_of = [](int rank) { return rank; };
  RankNames name = of_rank;
  RankNames describe = of_rank;
};

/// All the memory of one rank's end of a channel between GPUs: its pad, which the peers write to; its state, for its
/// own kernels; its control, where host and kernels tell each other things.
class DeviceEnd {
 public:
  /// A step of all ranks together, on a thread whose current device is this rank's. Returns when every rank's end is
  /// ready for kernels. Throws Error, and then on all ranks unless one has ended.
  DeviceEnd(DeviceHome& home, Exchange& exchange, const DeviceSideOptions& options, kernel::KernelLauncher& launcher);
  ~DeviceEnd();
  DeviceEnd(const DeviceEnd&) = delete;
  DeviceEnd& operator=(const DeviceEnd&) = delete;

  const DeviceSideOptions& options() const { return options_; }
  const kernel::DeviceChannel& channel() const { return channel_; }
  /// As the host sees it.
  kernel::Control& control() const { return *reinterpret_cast<kernel::Control*>(control_->host()); }
  /// How this rank's kernels see a peer's pool, for the host to write as PoolView has it: base, then mapped with
  /// release. From any thread, as long as this end is there; kernels in flight may see it or not.
  kernel::PoolView& pool_view(int peer) const { return kernel::pool_views(&control())[peer]; }
  /// Before each launch: see DevicePools.
  void look_at_pools() { pools_->look(); }
  PoolStats pool_stats(uint32_t direct) const {
    PoolStats stats = pools_->stats();
    stats.direct = direct;
    return stats;
  }
  const DeviceShare& share() const { return *share_; }
  /// Why the ranks have fewer blocks than was wanted; empty where they have as many.
  const std::string& why_fewer_blocks() const { return why_fewer_; }

  /// What may yet use this end.
  enum class User {
    kReplay,  ///< of a graph, whenever somebody begins one: it finds that it was called off, and ends
    kKernel,  ///< which may never end, and so holds its blocks of the GPU too
  };
  /// All of the memory stays until the process ends.
  void keep(User user);

 private:
  void set_up(Exchange& exchange, kernel::KernelLauncher& launcher);
  TrialSetting open_channel(Exchange& exchange, int resident);
  bool serves(Exchange& exchange, kernel::KernelLauncher& launcher, const TrialSetting& setting, std::string* why);
  Rooms agree(Exchange& exchange, int resident);
  void take_memory(uint32_t first_epoch);
  std::vector<kernel::PeerPads> exchange_pads(Exchange& exchange);
  void meet_pools(Exchange& exchange);
  std::vector<std::shared_ptr<DeviceRegion>> format(const TrialSetting& setting);
  void let_go();
  template <class Result>
  Result ask_device(const std::string& what, std::function<Result()> call) const;
  std::shared_ptr<DeviceRegion> pin(const std::string& what, size_t bytes) const;
  size_t pad_bytes() const { return kernel::DevicePad{channel_.shape}.bytes(); }

  DeviceHome& home_;
  const DeviceSideOptions options_;
  kernel::DeviceChannel channel_;
  BlockPromise promise_;
  std::string why_fewer_;
  std::unique_ptr<DeviceShare> share_;
  std::unique_ptr<DevicePools> pools_;
  Span span_;
  bool exported_ = false;  // peers may be writing there
  std::shared_ptr<DeviceRegion> state_, control_;
  MappedRegions own_;  // these two, to be given back
};

}  // namespace nvx
