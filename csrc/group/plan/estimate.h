#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "group/plan/plan.h"
#include "kernel/gpu/job.h"
#include "schedule/catalog.h"

namespace nvx {

/// How long a collective may take: what its algorithm has the busiest rank do, times what that has cost where somebody
/// measured it or, where nobody has, should cost. Pure. A guide to which way is the faster, and by how much; no
/// promise.
struct Estimate {
  double seconds = 0;  ///< of one call; 0: nothing is known
  uint64_t steps = 0;  ///< waits for another rank, one behind the other
  size_t bytes = 0;   ///< that this rank reads and writes in memory, sends or receives, or pushes to others: by the way
  std::string basis;  ///< what it rests on
};

/// What goes between hosts.
struct Medium {
  double message;  ///< seconds, from where it is sent to where it has been seen
  double byte;     ///< seconds
  std::string basis;
  bool one_a_host = false;  ///< which all ranks of a host share; else each rail has its own
};
Medium tcp();
/// Of ports that carry so much each in one direction.
Medium rdma(double gb_s);

/// What kernels push over.
struct DeviceLink {
  enum class Kind { kOneGpu, kNvlink, kPcie } kind = Kind::kNvlink;
  double gb_s = 450;  ///< in one direction, as the link's data say
  std::string who;    ///< of whom that is said
};

/// bytes as plan() and explain() count them.
Estimate estimate_inside(kernel::Algorithm algorithm, kernel::Collective collective, size_t bytes,
                         const PlanFacts& facts);

/// With the steps inside the hosts before and after.
Estimate estimate_between(const schedule::Row& row, kernel::Collective collective, size_t bytes, const PlanFacts& facts,
                          const Medium& carrier);

/// Of a proxy (group/hierarchy/host_proxy.h): kernels inside the hosts, copies, and what is between the hosts, all
/// overlapped.
Estimate estimate_proxied(const InterHostPlan& inter_host, kernel::Collective collective, size_t bytes,
                          const PlanFacts& facts, const Medium& carrier, const DeviceLink& link);

/// From the call to where the kernel has ended. bytes: as DeviceQuestion counts them.
Estimate estimate_device_algorithm(kernel::DeviceAlgorithm algorithm, kernel::Collective collective, size_t bytes,
                                   size_t ranks, const DeviceLink& link);

/// As NCCL's own tuner reckons with rings.
Estimate estimate_nccl(kernel::Collective collective, size_t bytes, size_t ranks, const DeviceLink& link);

/// Down to host memory, the collective there, and up again.
Estimate estimate_through_host(const Estimate& inside, kernel::Collective collective, size_t bytes, size_t ranks);

/// What one rank moves between hosts by one run of a schedule: its busiest rank's steps, counted one by one.
struct Moved {
  uint64_t messages = 0;
  size_t bytes = 0, largest = 0;
};
/// The first `near` ranks count as one host, whose messages to each other are left out.
Moved moved_by(const schedule::Row& row, const schedule::Layout& layout, int near = 1);

}  // namespace nvx
