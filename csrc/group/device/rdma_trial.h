#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/text.h"
#include "memory/gpu/peer_mappings.h"
#include "net/link.h"

/// GPUDirect RDMA: network cards read and write device memory. The link, the kernel modules and the bus all have to
/// serve it, and none of them shows whether the others do. So before its first use, each rank sends messages of every
/// size class from device memory to device memory of a rank of another host, over a link of its own and on a thread of
/// its own: any of these calls may hang.
namespace nvx {

struct RdmaTrialSetting {
  int next = 0;          ///< the rank to which this one sends; each rank is the next of one other
  std::string obstacle;  ///< the reason why this rank cannot; empty if there is none
  DeviceRegistry* registry = nullptr;
  int device = 0;
  std::function<std::unique_ptr<net::Link>()> open_link;
  std::chrono::milliseconds timeout{5000};  ///< the limit for opening the link, and for all messages
  /// Messages of device memory may take twice as long as those of host memory, and this much longer.
  std::chrono::milliseconds slack{5};
  RankNames name = of_rank;
};

/// Collective over all ranks. Returns a reason why network cards cannot access the memory of the devices' pools, or do
/// so more slowly than host memory; empty if they can. The same on all ranks. Throws Error if the bootstrap fails.
std::string why_no_rdma(Bootstrap& bootstrap, const RdmaTrialSetting& setting);

}  // namespace nvx
