#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "group/plan/kernel_model.h"
#include "group/plan/plan.h"
#include "kernel/gpu/job.h"
#include "schedule/catalog.h"

namespace nvx {

/// An estimated duration of a collective: the busiest rank's work in its algorithm, times measured unit costs, or
/// assumed ones where no measurement exists. Pure. It compares ways; it does not predict a duration exactly.
struct Estimate {
  double seconds = 0;  ///< of one call; 0: nothing is known
  uint64_t steps = 0;  ///< waits for another rank, in sequence
  size_t bytes = 0;    ///< read and written in memory, sent or received, or pushed, by this rank
  std::string basis;   ///< the source of the unit costs
};

/// The network between hosts.
struct Medium {
  double message;  ///< seconds, from the send until the receiver has seen it
  double byte;     ///< seconds
  std::string basis;
  bool one_a_host = false;  ///< all ranks of a host share it; otherwise each rail has its own
};
Medium tcp();
/// Ports with this rate in one direction.
Medium rdma(double gb_s);

/// `bytes`: as for `plan()` and `explain()`.
Estimate estimate_inside(kernel::Algorithm algorithm, kernel::Collective collective, size_t bytes,
                         const PlanFacts& facts);

/// Includes the steps inside the hosts before and after.
Estimate estimate_between(const schedule::Row& row, kernel::Collective collective, size_t bytes, const PlanFacts& facts,
                          const Medium& medium);

/// For a proxy (`group/hierarchy/host_proxy.h`): kernels, copies, and transfers between hosts, all overlapped.
Estimate estimate_proxied(const InterHostPlan& inter_host, kernel::Collective collective, size_t bytes,
                          const PlanFacts& facts, const Medium& medium, const DeviceLink& link);

/// From the call to the end of the kernel. `bytes`: as for `ExplainRequest`.
Estimate estimate_device_algorithm(kernel::DeviceAlgorithm algorithm, kernel::Collective collective, size_t bytes,
                                   const kernel::DeviceShape& shape, const DeviceLink& link);

/// NCCL's own tuning model for rings.
Estimate estimate_nccl(kernel::Collective collective, size_t bytes, size_t ranks, const DeviceLink& link);

/// Copies to host memory, the collective there, and copies back.
Estimate estimate_through_host(const Estimate& inside, kernel::Collective collective, size_t bytes, size_t ranks);

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

/// Steps and bytes of a collective inside a host, without a duration.
Estimate count_inside(kernel::Algorithm algorithm, kernel::Collective collective, size_t bytes, const PlanFacts& facts);
/// Seconds until a rank sees that another one of its host has reached a step.
double signal_seconds(const PlanFacts& facts);

/// The transfers of a collective between hosts, as their ranks see them.
struct RunBetween {
  schedule::Layout layout;
  int host_ranks = 1;  ///< ranks of one host among those of the layout
  double slices = 1;   ///< runs of this kind; the last one is shorter
};
/// The layout refers to `blocks`.
RunBetween run_between(kernel::Collective collective, size_t bytes, const InterHostPlan& inter_host,
                       const PlanFacts& facts, std::vector<schedule::Block>& blocks);

/// One run of a schedule: the traffic between hosts of its busiest rank, counted step by step.
struct Moved {
  uint64_t messages = 0;
  size_t bytes = 0, largest = 0;
};
/// The first `host_ranks` ranks are one host; messages among them do not count.
Moved moved_by(const schedule::Row& row, const schedule::Layout& layout, int host_ranks = 1);

}  // namespace nvx
