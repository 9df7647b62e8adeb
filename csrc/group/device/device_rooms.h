#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "memory/gpu/device_share.h"
#include "memory/shm/arena.h"

/// How many blocks the kernels of a group's ranks have, so that those of all groups find room on their GPUs at once.
namespace nvx {

/// Blocks of a GPU that this process has promised to a group. They count for every other group that is set up while the
/// promise lasts.
///
/// Processes that share a GPU without MPS take turns there, each with all of its blocks; under MPS their kernels are
/// side by side. So each rank tells its group what its process has promised. What is not seen are groups none of whose
/// processes is in this one.
class BlockPromise {
 public:
  BlockPromise() = default;
  /// how_many: told what the process has promised of that GPU before; the two are one step for all threads.
  BlockPromise(const ArenaId& home, int device, const std::function<uint32_t(uint32_t before)>& how_many);
  ~BlockPromise() { give_back(); }
  BlockPromise(BlockPromise&& other) noexcept { *this = std::move(other); }
  BlockPromise& operator=(BlockPromise&& other) noexcept;

  /// What the process had promised of that GPU before.
  uint32_t before() const { return before_; }
  void give_back();
  /// Kernels that may never end hold the blocks: nobody is promised them again.
  void keep() { blocks_ = 0; }

 private:
  ArenaId home_;
  int device_ = -1;
  uint32_t blocks_ = 0;
  uint32_t before_ = 0;
};

/// One rank's part in the agreement.
struct RoomRequest {
  int rank = 0;
  int ranks = 1;
  int device = 0;
  ArenaId home;                    ///< of this process
  std::array<uint8_t, 16> uuid{};  ///< of the GPU
  int resident = 0;                ///< blocks that it holds at once
  uint32_t wanted = 1;             ///< blocks
  uint64_t arena_free = 0;         ///< bytes
  uint32_t first_epoch = 0;
  RankNames name = of_rank;
};

/// What all ranks of a group have agreed on.
struct Rooms {
  uint32_t blocks = 0;      ///< of each rank
  std::string why_fewer;    ///< than was wanted; empty where they are as many
  uint64_t arena_free = 0;  ///< bytes of the fullest arena
  BlockPromise promise;     ///< of this rank's blocks
  /// Of all that the group may get on this rank's GPU, until the other ranks of this process have theirs promised: to
  /// be given back once all have said that they have come further than this.
  BlockPromise claim;
};

/// What ranks that are threads of one process, and share a GPU, need of CUDA_DEVICE_MAX_CONNECTIONS, and do not have by
/// what it is set to; nullptr: it is not. Empty where nothing is wanting.
std::string connections_wanted(uint32_t ranks, const char* set);

/// A step of all ranks together. share: of this group. Throws Error, and then on all ranks unless one has ended: also
/// where a GPU has no room for a block of each of its ranks.
Rooms agree_on_rooms(Exchange& exchange, const DeviceShare& share, const RoomRequest& request);

}  // namespace nvx
