#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "group/device/channel_options.h"
#include "memory/shm/arena.h"

/// The number of blocks that each rank's kernels get, such that the kernels of all groups fit on their GPUs at once.
namespace nvx {

/// Blocks of a GPU that this process has reserved for a group. Every other group that is set up before they are
/// released counts them.
///
/// Processes that share a GPU without MPS take turns, each with all of its blocks; under MPS their kernels run side by
/// side. So each process reserves at most its part of the GPU: see `ChannelOptions::processes`.
class BlockReservation {
 public:
  BlockReservation() = default;
  /// `how_many` gets the blocks reserved on that GPU before; reading and adding is atomic.
  BlockReservation(const ArenaId& process, int device, const std::function<uint32_t(uint32_t before)>& how_many);
  ~BlockReservation() { release(); }
  BlockReservation(BlockReservation&& other) noexcept { *this = std::move(other); }
  BlockReservation& operator=(BlockReservation&& other) noexcept;

  /// The number of blocks that the process had reserved on that GPU before.
  uint32_t before() const { return before_; }
  void release();
  /// For kernels that may never end and hold the blocks: these stay reserved until the process ends.
  void keep() { blocks_ = 0; }

 private:
  ArenaId process_;
  int device_ = -1;
  uint32_t blocks_ = 0;
  uint32_t before_ = 0;
};

/// A rank's GPU, for the agreement.
struct GpuToShare {
  ArenaId process;                  ///< this one
  std::array<uint8_t, 16> uuid{};   ///< of the GPU
  int resident = 0;                 ///< blocks that are resident at once
  GpuLink link = GpuLink::kOneGpu;  ///< the slowest to a GPU of another rank, as this rank sees it
  uint32_t kind = 0;                ///< of GPU and driver, for `BlockGrant::first_of_kind`
};

struct BlockGrant {
  uint32_t blocks = 0;              ///< of each rank
  std::string why_fewer;            ///< the reason for fewer than requested; empty if there are as many
  GpuLink link = GpuLink::kOneGpu;  ///< the slowest that any rank sees
  bool first_of_kind = true;        ///< no rank before this one has a GPU and driver of its kind
  uint64_t arena_free = 0;          ///< bytes free in the fullest arena, for each rank of the group that shares it
  BlockReservation reservation;     ///< of this rank's blocks
  /// All blocks that the group's ranks of this process may get on this rank's GPU, held until the other ranks of this
  /// process have their reservations. Release it once all ranks have reported that they are past this point.
  BlockReservation claim;
};

/// The streams on which one group launches kernels on a GPU. Kernels of different groups may wait for each other's
/// ranks in any order, so those of different streams need a hardware queue (a connection) each: the first stream too
/// many makes the process warn, once per GPU. A captured stream counts: it stands for a branch of a graph, and a graph
/// keeps no order between its branches.
class StreamsInUse {
 public:
  StreamsInUse(const ArenaId& process, int device) : gpu_(process, device) {}
  ~StreamsInUse();
  StreamsInUse(const StreamsInUse&) = delete;

  /// Call before each launch. Takes a lock at the first one on each stream only.
  void note(const void* stream) {
    if (std::ranges::find(known_, stream) == known_.end()) add(stream);
  }

 private:
  void add(const void* stream);

  const std::pair<ArenaId, int> gpu_;
  std::vector<const void*> known_;
};

/// Advice, or empty if none is needed. `set` is the value of an environment variable; nullptr if it is not set.
/// For ranks that are threads of one process and share a GPU: whether `CUDA_DEVICE_MAX_CONNECTIONS` is too small for
/// them, and whether `CUDA_MODULE_LOADING` lets a kernel's first launch wait for kernels that run.
std::string connections_warning(uint32_t ranks, const char* set);
std::string eager_loading_warning(uint32_t ranks, const char* set);
/// For groups of one process that use this many streams of a GPU.
std::string connections_warning_for(size_t groups, size_t streams, const char* set);

/// Collective over all ranks, which also agree on the link between their GPUs. `mappings` is of this group. Throws
/// Error, and then on all ranks unless one has exited: also if a GPU has no room for one block of each of its ranks.
BlockGrant reserve_blocks(Bootstrap& bootstrap, const PeerMappings& mappings, const ChannelOptions& options,
                          const GpuToShare& gpu);

}  // namespace nvx
