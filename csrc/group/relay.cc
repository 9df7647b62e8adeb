#include "group/relay.h"

#include <algorithm>

#include "group/chunks.h"

namespace nvx {
namespace {

using kernel::Collective;

/// One row a collective that may go as a relay.
struct RelayRow {
  Collective collective;
  bool by_blocks;  ///< each rank has a block of its own, which its seat on every host carries
};

constexpr RelayRow kRelays[] = {
    {Collective::kAllReduce, /*by_blocks=*/false},
    {Collective::kReduceScatter, /*by_blocks=*/true},
    {Collective::kAllGather, /*by_blocks=*/true},
};

}  // namespace

const char* why_not_relayed(Collective collective, DType dtype, size_t count, const PlanFacts& facts) {
  if (facts.hosts == 1) return "the ranks are on one host";
  const auto* row = std::find_if(std::begin(kRelays), std::end(kRelays),
                                 [&](const RelayRow& r) { return r.collective == collective; });
  if (row == std::end(kRelays)) return "only all_reduce, reduce_scatter and all_gather do so";
  if (!goes_in_chunks(collective, dtype, count)) return "small: it would only wait for more steps";
  if (facts.rails == 1) return "a host has only one rank, so there is nothing to do inside it";
  if (row->by_blocks && facts.world != facts.rails * facts.hosts)
    return "hosts have different numbers of ranks, so some blocks have no rail of their own";
  return nullptr;
}

size_t relay_slice(const Bridge& bridge, const PlanFacts& facts) {
  constexpr size_t kLine = 64;  // no element straddles two
  return std::min(bridge.slice, std::max(kChunk / facts.hosts / kLine, size_t(1)) * kLine);
}

}  // namespace nvx
