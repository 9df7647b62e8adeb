#pragma once

#include <string>
#include <vector>

#include "group/plan/estimate.h"
#include "group/plan/plan.h"

namespace nvx {

/// One way to carry out a collective.
struct Way {
  std::string by;      ///< "shared memory", "between hosts"; for tensors of a device "NCCL", "kernels", "host memory"
  std::string what;    ///< the algorithm
  std::string why;     ///< the reason for it, or against it
  std::string set_by;  ///< the setting that changes it
  bool runs = false;
  Estimate estimate{};  ///< `seconds` is 0 if the way cannot be taken, or if nothing is known
};

/// All ways for tensors of the CPU, including the one that runs. `bytes`: as for `explain()`.
std::vector<Way> ways_of(kernel::Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium);

}  // namespace nvx
