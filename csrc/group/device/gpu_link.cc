#include "group/device/gpu_link.h"

#include <algorithm>

#include "base/log.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

/// The link to a GPU of another rank; nothing if only NVML has it.
std::optional<GpuLink> link_without_nvml(const DevicePeer& peer) {
  if (peer.kind == ShareKind::kHost) return GpuLink::kPcie;
  if (peer.same_gpu) return GpuLink::kOneGpu;
  if (peer.kind == ShareKind::kFabric) return GpuLink::kNvlink;
  return std::nullopt;
}

const GpuProperties* find(const std::vector<GpuProperties>& gpus, const DevicePeer& peer) {
  const auto gpu = std::ranges::find(gpus, text_of_uuid(peer.uuid), &GpuProperties::uuid);
  return gpu == gpus.end() ? nullptr : &*gpu;
}

/// NVML lists no GPU that a container hides. A GPU without NVLink has it to none.
GpuLink link_between(const GpuProperties* own, const GpuProperties* other) {
  if (!own) return GpuLink::kNvlink;
  const bool has_nvlink = own->domain || std::ranges::any_of(own->lanes, &NvLinkLane::active);
  return has_nvlink && (!other || joined_by_nvlink(*own, *other)) ? GpuLink::kNvlink : GpuLink::kPcie;
}

}  // namespace

GpuLink link_to_peers(const PeerMappings& mappings, const ChannelOptions& options, std::chrono::milliseconds timeout) {
  GpuLink slowest = GpuLink::kOneGpu;
  std::optional<std::vector<GpuProperties>> gpus;
  for (int r = 0; r < options.ranks; ++r) {
    if (r == options.rank) continue;
    std::optional<GpuLink> link = link_without_nvml(mappings.peer(r));
    if (!link && !gpus) {
      try {
        gpus = call_or_throw<std::vector<GpuProperties>>("querying NVML for the links of GPUs",
                                                         Deadline::after(timeout), options.gpus);
      } catch (const std::exception& error) {
        gpus.emplace();
        NVX_LOG(kInfo, "group %s: kernels are tuned for NVLink between the GPUs: %s", options.group.c_str(),
                without_name(error.what()).c_str());
      }
    }
    if (!link) link = link_between(find(*gpus, mappings.peer(options.rank)), find(*gpus, mappings.peer(r)));
    slowest = std::max(slowest, *link);
  }
  return slowest;
}

}  // namespace nvx
