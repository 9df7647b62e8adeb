#pragma once

#include "group/device/channel_options.h"
#include "group/plan/tuning.h"
#include "memory/gpu/peer_mappings.h"

namespace nvx {

/// The slowest link from this rank's GPU to another rank's, as this rank sees it: other ranks may see another one, so
/// `reserve_blocks()` agrees on the slowest that any rank sees. NVLink if NVML cannot be queried, which is logged.
/// Waits for NVML up to `timeout`.
GpuLink link_to_peers(const PeerMappings& mappings, const ChannelOptions& options, std::chrono::milliseconds timeout);

}  // namespace nvx
