#include "kernel/gpu/residency.h"

#include <algorithm>

namespace nvx::kernel {
namespace {

uint32_t part_of(const GpuCapacity& gpu) { return uint32_t(std::max(gpu.resident, 0)) / std::max(gpu.processes, 1u); }

/// Blocks of that part that no group has reserved.
uint32_t left_on(const GpuCapacity& gpu) { return part_of(gpu) - std::min(part_of(gpu), gpu.reserved); }

/// Why the ranks of this GPU have this many blocks each and not more.
std::string reason(const GpuCapacity& gpu, size_t index, uint32_t share) {
  std::string why =
      "GPU " + std::to_string(index) + " of the group holds " + std::to_string(gpu.resident) + " blocks at once; ";
  const bool shared = gpu.processes > 1;
  if (shared)
    why += std::to_string(part_of(gpu)) + " of them for each of " + std::to_string(gpu.processes) + " processes; ";
  if (gpu.reserved > 0) why += std::to_string(gpu.reserved) + " of them are reserved for other groups; ";
  why += shared ? "a process's " : "its ";
  why += gpu.ranks == 1 ? "rank needs all of its blocks there at once: "
                        : std::to_string(gpu.ranks) + " ranks need all of their blocks there at once: ";
  if (share == 0) return why + "not even one per rank fits";
  const bool are_all = share == left_on(gpu) / gpu.ranks;
  return why + std::to_string(share) + (are_all ? " per rank fit" : " per rank, so that later groups find some too");
}

}  // namespace

int resident_at_once(std::span<const KernelAttributes> attributes) {
  const auto least = std::ranges::min_element(attributes, {}, &KernelAttributes::resident);
  return least == attributes.end() ? 0 : std::max(least->resident, 0);
}

uint32_t share_of(const GpuCapacity& gpu) {
  constexpr uint32_t kGroups = 4;
  const uint32_t left = left_on(gpu);
  return left < gpu.ranks ? 0 : std::max(left / kGroups / gpu.ranks, 1u);
}

BlockAgreement agree_on_blocks(std::span<const GpuCapacity> gpus, uint32_t wanted) {
  BlockAgreement agreed{wanted, ""};
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (gpus[i].ranks == 0) continue;
    const uint32_t share = share_of(gpus[i]);
    if (share < agreed.blocks) agreed = {share, reason(gpus[i], i, share)};
  }
  return agreed;
}

}  // namespace nvx::kernel
