#pragma once

#include <string>
#include <vector>

#include "group/plan/device_plan.h"
#include "group/plan/estimate.h"
#include "group/plan/plan.h"
#include "group/setup/gpu_topology.h"

namespace nvx {

struct ExplainRequest {
  kernel::Collective collective;
  size_t bytes;  ///< the bytes that each rank puts in, or that the root sends, as in `explain()` for CPU tensors
  PlanFacts facts;
  bool has_kernels;       ///< in this build
  std::string no_nccl;    ///< the reason why this torch has no NCCL; empty if it has
  DeviceLink link{};      ///< between the ranks' GPUs
  Medium medium = tcp();  ///< between hosts
};

/// All ways for float32 tensors, summed or in pieces of one size, in a group with one GPU per rank and outside of
/// captures. Marks the one that runs.
std::vector<Way> explain_on_device(const ExplainRequest& request);

/// The value by which a group decides, also where the table leaves it to the machine. `link`: between its GPUs.
uint64_t tuned(Tune key, const PlanFacts& facts, GpuLink link);

/// The slowest link between the GPUs of this machine, by data sheet; without GPUs, an NVLink named as an assumption.
DeviceLink slowest_link(const GpuTopology& topology);

/// The size that `NVX_DELEGATE` compares: the longest input or output of any rank. `bytes`: as for `ExplainRequest`.
size_t bytes_of_whole(kernel::Collective collective, size_t bytes, size_t ranks);

}  // namespace nvx
