#pragma once

#include <cstddef>
#include <optional>

#include "group/plan/plan.h"

namespace nvx {

/// The links of hosts that are all alike.
struct Fabric {
  double inside = 0;   ///< bytes a second that a rank reads and writes in memory, or in that of its host's ranks
  double between = 0;  ///< bytes a second of a network card, in each direction
  double latency = 0;  ///< seconds of a message between hosts, beside those of its bytes
  size_t cards = 1;    ///< network cards of a host, which its ranks share
};

struct Simulation {
  double seconds = 0;  ///< of a call, without torch's own part
  size_t slices = 1;
  size_t inside_bytes = 0;     ///< read and written by a rank for the steps inside its host and for reductions
  size_t between_bytes = 0;    ///< sent or received by the busiest host
  size_t all_bytes = 0;        ///< sent by all hosts
  double inside_seconds = 0;   ///< of these
  double between_seconds = 0;  ///< in which the busiest card sends or receives
};

/// Simulates the plan's schedule message by message, as `net/executor.h` runs it and `Hierarchical::overlap()` its
/// slices. Pure. Every message takes the latency, and then its bytes occupy the sender's and the receiver's card, one
/// message after the other. If all hosts do the same, one of them is simulated. Of many slices the first ones are
/// simulated, and the others take as long as these took in the end.
///
/// `bytes`: as for `explain()`. `facts`: of two or more hosts with the same number of ranks. Nothing if there are too
/// many messages to simulate.
std::optional<Simulation> simulate(kernel::Collective collective, size_t bytes, const PlanFacts& facts,
                                   const Fabric& fabric);

}  // namespace nvx
