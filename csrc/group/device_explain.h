#pragma once

#include <string>
#include <vector>

#include "group/device_plan.h"
#include "group/plan.h"

namespace nvx {

/// One way that a collective of a device's tensors can go.
struct DeviceWay {
  std::string by;      ///< "NCCL", "kernels", "host memory"
  std::string what;    ///< the algorithm
  std::string why;     ///< or why not
  std::string set_by;  ///< what changes it
  bool runs = false;
};

struct DeviceQuestion {
  kernel::Collective collective;
  size_t bytes;  ///< that each rank puts in, or the root hands out, as explain() has it of tensors of the CPU
  PlanFacts facts;
  bool has_kernels;     ///< this build
  std::string no_nccl;  ///< why this torch has none; empty where it has
};

/// All ways, and which of them float32 tensors that are summed, or moved in pieces of one size, would go in a group of
/// one host whose ranks have a GPU each, outside of captures.
std::vector<DeviceWay> explain_on_device(const DeviceQuestion& question);

/// What NVX_DELEGATE compares: the longest that any rank has of it, put in or got. As DeviceQuestion counts bytes.
size_t bytes_of_whole(kernel::Collective collective, size_t bytes, size_t ranks);

}  // namespace nvx
