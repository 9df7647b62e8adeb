#pragma once

#include <string>
#include <vector>

#include "group/plan/estimate.h"
#include "group/plan/plan.h"

namespace nvx {

/// One way that a collective can go.
struct Way {
  std::string by;      ///< "shared memory", "between hosts"; of a device's tensors "NCCL", "kernels", "host memory"
  std::string what;    ///< the algorithm
  std::string why;     ///< or why not
  std::string set_by;  ///< what changes it
  bool runs = false;
  Estimate estimate{};  ///< without seconds where it cannot go that way, or nobody knows
};

/// All ways of tensors of the CPU, the one that runs among them. bytes: as explain() counts them.
std::vector<Way> ways_of(kernel::Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium);

}  // namespace nvx
