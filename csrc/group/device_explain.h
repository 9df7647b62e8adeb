#pragma once

#include <string>
#include <vector>

#include "group/meet/gpu_topology.h"
#include "group/plan/alternatives.h"
#include "group/plan/device_plan.h"
#include "group/plan/plan.h"

namespace nvx {

struct DeviceQuestion {
  kernel::Collective collective;
  size_t bytes;  ///< that each rank puts in, or the root hands out, as explain() has it of tensors of the CPU
  PlanFacts facts;
  bool has_kernels;        ///< this build
  std::string no_nccl;     ///< why this torch has none; empty where it has
  DeviceLink link{};       ///< between the ranks' GPUs
  Medium carrier = tcp();  ///< between hosts
};

/// All ways, and which of them float32 tensors that are summed, or moved in pieces of one size, would go in a group
/// whose ranks have a GPU each, outside of captures.
std::vector<Way> explain_on_device(const DeviceQuestion& question);

/// Between the GPUs of this machine: their slowest pair, as its link's data say; where there are none, an NVLink that
/// is named as a supposition.
DeviceLink slowest_link(const GpuTopology& topology);

/// What NVX_DELEGATE compares: the longest that any rank has of it, put in or got. As DeviceQuestion counts bytes.
size_t bytes_of_whole(kernel::Collective collective, size_t bytes, size_t ranks);

}  // namespace nvx
