#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernel/launch_cuda.h"

/// Kernels of ranks that wait for each other must be on their GPUs all at once: a block that finds no room waits for
/// one that waits for it, until their patience ends. So the blocks of a rank are what every GPU of the group has room
/// for.
namespace nvx::kernel {

/// A GPU that ranks of a group run on.
struct GpuRoom {
  int resident = 0;    ///< blocks that it holds at once: resident_at_once of what load_cuda has said there
  uint32_t ranks = 1;  ///< whose kernels may be on it at once; a rank that may launch on two streams counts twice
};

struct BlockAgreement {
  uint32_t blocks = 0;    ///< of each rank; 0 where some GPU does not hold one block of each of its ranks
  std::string why_fewer;  ///< which GPU, and why; empty where as many as wanted fit
};

/// Whatever kernels come together: as many blocks as fit of the one that takes most room.
int resident_at_once(std::span<const KernelFacts> facts);

/// Pure: ranks that are told the same GPUs in the same order agree.
BlockAgreement agree_on_blocks(std::span<const GpuRoom> gpus, uint32_t wanted);

}  // namespace nvx::kernel
