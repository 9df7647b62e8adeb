#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernel/gpu/launch_cuda.h"

/// Kernels of ranks that wait for each other must all be resident on their GPUs at once: a block that does not fit
/// would wait for blocks that wait for it, until their timeout. This concerns the ranks of one group, and groups that
/// have kernels in flight at the same time: ranks may launch them in different orders, and streams may delay them
/// differently. So the blocks of a rank are limited by what every GPU of the group can hold beside the blocks reserved
/// for other groups.
namespace nvx::kernel {

/// A GPU that runs ranks of a group.
struct GpuCapacity {
  int resident = 0;        ///< blocks that it holds at once: resident_at_once() of the attributes from load_cuda()
  uint32_t ranks = 1;      ///< ranks of one process whose kernels may run at once
  uint32_t reserved = 0;   ///< blocks that one process's other groups may use at the same time
  uint32_t processes = 1;  ///< processes that may use it; each has an equal part of its blocks
};

struct BlockAgreement {
  uint32_t blocks = 0;    ///< per rank; 0 if a GPU cannot hold one block for each of its ranks
  std::string why_fewer;  ///< the GPU that limits the number, and why; empty if all wanted blocks fit
};

/// The number of blocks that are resident at once for any mix of kernels: that of the largest kernel.
int resident_at_once(std::span<const KernelAttributes> attributes);

/// The blocks that each rank of a group may have on one GPU, at most. A group gets a quarter of the blocks that its
/// process has not reserved for others, but at least one per rank. So the first groups get many, later groups still get
/// some, and together they never exceed the process's part of the GPU. On an H100 (132 blocks) the first two groups of
/// a single rank get all 24 blocks that they want. A smaller GPU has less bandwidth, which fewer blocks saturate.
/// Returns 0 if not even one block per rank is left.
uint32_t share_of(const GpuCapacity& gpu);

/// A pure function: ranks that pass the same GPUs in the same order get the same result.
BlockAgreement agree_on_blocks(std::span<const GpuCapacity> gpus, uint32_t wanted);

}  // namespace nvx::kernel
