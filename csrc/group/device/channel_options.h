#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/text.h"
#include "group/device/device_pools.h"
#include "group/plan/plan.h"
#include "group/setup/gpu_topology.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/peer_mappings.h"

namespace nvx {

/// Multicast memory of each rank, for NVLS. With 24 blocks a slot has 85 KiB of it.
inline constexpr size_t kMulticastBytes = size_t(8) << 20;

/// A rank's part in a channel between GPUs. These ranks may be a subset of their group.
struct ChannelOptions : MappingOptions {
  std::string group;                                    ///< the group's name, for messages
  PlanFacts::Force force = PlanFacts::Force::kNothing;  ///< the same on every rank, as is `tuning`
  Tuning tuning = {};
  /// Of each rank, if all GPUs have room for them: see `reserve_blocks()`. 0: as many as `tuning` has for the link.
  uint32_t blocks = 0;
  /// NVML's GPUs of this machine. May throw Error, and may hang.
  std::function<std::vector<GpuProperties>()> gpus = gpus_here;
  /// Processes of this host that any group of this process has had; 0: not known. If ranks share a GPU, processes that
  /// no group with a device has yet count as sharing it too, so that groups of a few of them leave room for all.
  uint32_t processes = 0;
  uint32_t first_epoch = 0;                ///< tests start near the wrap
  std::chrono::milliseconds busy{10'000};  ///< the limit for other work to let the first kernels begin
  /// Kernels of which a small operation takes longer are not used; 0: no limit.
  std::chrono::microseconds slowest{0};
  std::chrono::milliseconds drain_timeout{5000};  ///< when this rank leaves: the limit for the next kernel to end
  /// Called now and then during waits of set-up; throws Error if they are pointless.
  std::function<void()> check_peers = [] {};
  /// Called before each launch, which counts as in flight already: the driver may block in it until its kernel has
  /// ended, as with CUDA_LAUNCH_BLOCKING and in debuggers.
  std::function<void()> on_launch = [] {};
  /// True once no peer's kernel can write to the memory that this rank has exported. Polled after this rank has left,
  /// possibly by threads of other groups; the memory is not reused before.
  std::function<bool()> peers_gone = [] { return false; };
  /// 1 + the offset of this range in this rank's pool, which peers may map; 0: not in it. Called at every launch.
  kernel::PlaceOf place_of = [](const std::byte*, size_t) { return 0; };
  PoolSizes pool_sizes = {};
  /// `rank_of` maps to ranks of the group, `describe` gives "rank 3 (pid 4711, host a01)".
  std::function<int(int rank)> rank_of = [](int rank) { return rank; };
  RankNames describe = of_rank;
};

}  // namespace nvx
