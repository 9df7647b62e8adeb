#include "kernel/cpu/run_on_cpu.h"
#include "kernel/cpu/host_collectives.h"
#include "kernel/cpu/own_time.h"

namespace nvx::kernel {
namespace {

struct Row {
  Algorithm algorithm;
  const char* name;
  bool (*run)(CpuExec&, Channel&, const CollectiveArgs&);
};

constexpr Row kRows[] = {
    {Algorithm::kBarrier, "barrier", barrier},
    {Algorithm::kReduceOneShot, "reduce_one_shot", reduce_one_shot},
    {Algorithm::kReducePipelined, "reduce_pipelined", reduce_pipelined},
    {Algorithm::kReduceScatterOneShot, "reduce_scatter_one_shot", reduce_scatter_one_shot},
    {Algorithm::kReduceScatterPipelined, "reduce_scatter_pipelined", reduce_scatter_pipelined},
    {Algorithm::kPublishOneShot, "publish_one_shot", publish_one_shot},
    {Algorithm::kPublishPipelined, "publish_pipelined", publish_pipelined},
    {Algorithm::kExchange, "exchange", exchange},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (size_t(kRows[i].algorithm) != i) return false;
  }
  return true;
}
static_assert(in_order(), "kRows has one row for each Algorithm, in the order of run_on_cpu.h");

/// Whether every rank writes data that others read and reads data that they write.
bool goes_both_ways(Algorithm algorithm, const Call& call) {
  return call.root < 0 || algorithm == Algorithm::kReducePipelined;
}

/// Whether this rank writes, in an algorithm where not every rank does. A rank that only reads has no policy to choose.
bool writes(Algorithm algorithm, const Call& call, int rank) {
  if (algorithm == Algorithm::kExchange) return true;  // a rank that only reads has 0 bytes
  const bool root_writes = algorithm == Algorithm::kPublishOneShot || algorithm == Algorithm::kPublishPipelined;
  return root_writes == (rank == call.root);
}

/// Groups operations whose costs are comparable. The deciding rank's own work differs if it is the root.
size_t kind_of(Algorithm algorithm, const Call& call) {
  constexpr size_t kRoots = 3;
  return kRoots * size_t(algorithm) + (call.root < 0 ? 0 : call.root == 0 ? 1 : 2);
}

}  // namespace

const char* name(Algorithm algorithm) { return kRows[size_t(algorithm)].name; }

bool run_on_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const CollectiveArgs& args) {
  const auto run = [&](CachePolicy policy) {
    ex.stage_by(policy);
    return kRows[size_t(algorithm)].run(ex, channel, args);
  };
  CachePolicies& policies = channel.cache_policies();
  const bool both_ways = goes_both_ways(algorithm, args.call);
  const bool chooses = !channel.lends() && args.bytes >= CachePolicyRecords::kLeastBytes && ex.has_choice() &&
                       (both_ways || writes(algorithm, args.call, channel.rank()));
  if (policies.only() || !chooses) {
    channel.announce(CachePolicy::kCached);  // for ranks that have more bytes than this one
    return run(policies.only().value_or(CachePolicy::kCached));
  }
  CachePolicyRecord& record = policies.record(kind_of(algorithm, args.call), args.bytes);
  if (both_ways && !channel.leads()) {
    if (!run(record.now())) return false;
    record.now(channel.next_policy());
    return true;
  }
  const CachePolicy next = record.next();
  if (both_ways) channel.announce(next);
  ex.measure();
  const OwnTime time(args.bytes);
  if (!run(record.now())) return false;
  if (const auto spent = time.spent()) {
    const double cost = (*spent - ex.waited()).count() / double(args.bytes);
    both_ways ? record.add(cost) : record.add_write(cost);
  }
  record.now(next);
  return true;
}

}  // namespace nvx::kernel
