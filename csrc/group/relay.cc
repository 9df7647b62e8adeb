#include "group/relay.h"

#include "group/chunks.h"

namespace nvx {

const char* why_not_relayed(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts) {
  if (facts.hosts == 1) return "the ranks are on one host";
  if (collective != kernel::Collective::kAllReduce) return "all_reduce is the only one that does so";
  if (!goes_in_chunks(collective, dtype, count)) return "small: it would only wait for more steps";
  if (facts.rails == 1) return "a host has only one rank, which would sum nothing";
  return nullptr;
}

}  // namespace nvx
