#include "group/hierarchy/host_proxy.h"

#include <algorithm>

#include "group/plan/chunks.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx {

using kernel::Collective;

const char* why_not_by_kernels(Collective collective, DType dtype, size_t count, const PlanFacts& facts) {
  if (facts.hosts == 1) return "the ranks are on one host";
  const bool by_blocks = collective == Collective::kReduceScatter || collective == Collective::kAllGather;
  if (!by_blocks && collective != Collective::kAllReduce)
    return "only all_reduce, reduce_scatter and all_gather use kernels";
  if (count == 0) return "there is nothing to move";
  if (dtype == DType::kBytes) return "the type is unknown to nvx, so its elements may differ by rank";
  if (by_blocks && facts.world != facts.rails * facts.hosts)
    return "hosts have different numbers of ranks, so some blocks have no rail of their own";
  return nullptr;
}

/// A launch lists both ends of every piece that a rank copies: one piece per host, or one per rank and its own.
bool can_be_proxied(Collective collective, DType dtype, size_t count, const PlanFacts& facts) {
  if (facts.hosts == 1 || collective == Collective::kBarrier) return false;
  const size_t most = why_not_by_kernels(collective, dtype, count, facts) ? facts.world + 1 : facts.hosts;
  return 2 * most <= kernel::kLaunchPieces;
}

size_t proxy_slice(const InterHostPlan& inter_host, const PlanFacts& facts) {
  constexpr size_t kCacheLine = 64;  // no element straddles two
  return std::min(inter_host.slice, std::max(kChunk / facts.hosts / kCacheLine, size_t(1)) * kCacheLine);
}

}  // namespace nvx
