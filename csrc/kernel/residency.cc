#include "kernel/residency.h"

#include <algorithm>

namespace nvx::kernel {

int resident_at_once(std::span<const KernelFacts> facts) {
  const auto least = std::min_element(
      facts.begin(), facts.end(), [](const KernelFacts& a, const KernelFacts& b) { return a.resident < b.resident; });
  return least == facts.end() ? 0 : std::max(least->resident, 0);
}

BlockAgreement agree_on_blocks(std::span<const GpuRoom> gpus, uint32_t wanted) {
  BlockAgreement agreed{wanted, ""};
  for (size_t i = 0; i < gpus.size(); ++i) {
    const GpuRoom& gpu = gpus[i];
    if (gpu.ranks == 0) continue;
    const uint32_t fit = uint32_t(std::max(gpu.resident, 0)) / gpu.ranks;
    if (fit >= agreed.blocks) continue;
    agreed = {fit, "GPU " + std::to_string(i) + " of the group holds " + std::to_string(gpu.resident) +
                       " blocks at once, and its " + std::to_string(gpu.ranks) + " ranks need all of theirs there: " +
                       (fit == 0 ? "not one each fits" : std::to_string(fit) + " each fit")};
  }
  return agreed;
}

}  // namespace nvx::kernel
