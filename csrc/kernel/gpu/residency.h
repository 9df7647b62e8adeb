#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernel/gpu/launch_cuda.h"

/// Kernels of ranks that wait for each other must be on their GPUs all at once: a block that finds no room waits for
/// one that waits for it, until their patience ends. That holds for the ranks of one group, and for groups that have
/// kernels in flight at the same time: ranks may begin theirs in different orders, and even where they do not, streams
/// may hold them up differently. So the blocks of a rank are what every GPU of the group has room for, beside those
/// that other groups have been promised there.
namespace nvx::kernel {

/// A GPU that ranks of a group run on.
struct GpuRoom {
  int resident = 0;       ///< blocks that it holds at once: resident_at_once of what load_cuda has said there
  uint32_t ranks = 1;     ///< whose kernels may be on it at once; a rank that may launch on two streams counts twice
  uint32_t promised = 0;  ///< blocks that other groups may have on it at the same time
};

struct BlockAgreement {
  uint32_t blocks = 0;    ///< of each rank; 0 where some GPU does not hold one block of each of its ranks
  std::string why_fewer;  ///< which GPU, and why; empty where as many as wanted fit
};

/// Whatever kernels come together: as many blocks as fit of the one that takes most room.
int resident_at_once(std::span<const KernelFacts> facts);

/// The blocks that each rank of a group may have on one GPU, however many it wants. A group gets a quarter of what no
/// other one has been promised, and a block a rank where that is less: so the first ones get much, each later one finds
/// something, and together they never get more than there is. On an H100 (132) a quarter is more than a rank wants
/// that is alone there, for the first five groups; a GPU that is so small that it is less is slow enough to be filled
/// by that. 0 where not even a block a rank is left.
uint32_t share_of(const GpuRoom& gpu);

/// Pure: ranks that are told the same GPUs in the same order agree.
BlockAgreement agree_on_blocks(std::span<const GpuRoom> gpus, uint32_t wanted);

}  // namespace nvx::kernel
