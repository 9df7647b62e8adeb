#pragma once

#include <cstdint>

#include "base/error.h"
#include "kernel/gpu/job.h"

/// Launches for a single device.
namespace nvx::gpu {

/// One rank of a fused launch. All pointers are to device memory.
struct FusedRank {
  kernel::DeviceChannel channel;  ///< prepared()
  const kernel::Job* jobs;
  uint32_t count;
  const kernel::Piece* table;
};

/// Runs all ranks in one cooperative launch, so that all blocks are resident at once. `ranks` is in device memory.
Status launch_fused(const FusedRank* ranks, uint32_t count, uint32_t blocks, void* stream);

}  // namespace nvx::gpu
