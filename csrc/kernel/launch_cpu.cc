#include "kernel/direct.h"
#include "kernel/launch.h"
#include "kernel/own_time.h"

namespace nvx::kernel {
namespace {

using Run = bool (*)(CpuExec&, Channel&, const Work&);

struct Row {
  Algorithm algorithm;
  const char* name;
  Run run;
};

constexpr Row kRows[] = {
    {Algorithm::kBarrier, "barrier", [](CpuExec& ex, Channel& ch, const Work& w) { return barrier(ex, ch, w.call); }},
    {Algorithm::kReduceOneShot, "reduce_one_shot",
     [](CpuExec& ex, Channel& ch, const Work& w) { return reduce_one_shot(ex, ch, w.call, w.in, w.out, w.count); }},
    {Algorithm::kReducePipelined, "reduce_pipelined",
     [](CpuExec& ex, Channel& ch, const Work& w) { return reduce_pipelined(ex, ch, w.call, w.in, w.out, w.count); }},
    {Algorithm::kReduceScatterOneShot, "reduce_scatter_one_shot",
     [](CpuExec& ex, Channel& ch, const Work& w) { return reduce_scatter_one_shot(ex, ch, w.call, w.send, w.out); }},
    {Algorithm::kReduceScatterPipelined, "reduce_scatter_pipelined",
     [](CpuExec& ex, Channel& ch, const Work& w) { return reduce_scatter_pipelined(ex, ch, w.call, w.send, w.out); }},
    {Algorithm::kPublishOneShot, "publish_one_shot",
     [](CpuExec& ex, Channel& ch, const Work& w) { return publish_one_shot(ex, ch, w.call, w.in, w.recv); }},
    {Algorithm::kPublishPipelined, "publish_pipelined",
     [](CpuExec& ex, Channel& ch, const Work& w) { return publish_pipelined(ex, ch, w.call, w.in, w.recv); }},
    {Algorithm::kExchange, "exchange",
     [](CpuExec& ex, Channel& ch, const Work& w) {
       return exchange(ex, ch, w.call, ExchangeTask{w.send, w.recv, w.meets_all, w.meets});
     }},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (size_t(kRows[i].algorithm) != i) return false;
  }
  return true;
}
static_assert(in_order());

/// Whether the ranks on one side of the root only write, and those on the other only read. These have nothing to
/// decide, and learn in vain.
bool goes_one_way(Algorithm algorithm, const Call& call) {
  return call.root >= 0 && algorithm != Algorithm::kReducePipelined;
}

}  // namespace

const char* name(Algorithm algorithm) { return kRows[size_t(algorithm)].name; }

bool launch_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const Work& work) {
  const auto run = [&](CachePolicy policy) {
    ex.stage_by(policy);
    return kRows[size_t(algorithm)].run(ex, channel, work);
  };
  CachePolicies& policies = channel.cache_policies();
  if (policies.only()) return run(*policies.only());
  if (work.bytes < CachePolicyRecords::kLeastBytes || !ex.has_choice()) return run(CachePolicy::kCached);

  const bool one_way = goes_one_way(algorithm, work.call);
  CachePolicyRecord& record = policies.record(2 * size_t(algorithm) + one_way, work.bytes);
  if (!one_way && !channel.leads()) {
    if (!run(record.now())) return false;
    record.now(channel.next_policy());
    return true;
  }
  const CachePolicy next = record.next();
  channel.tell(next);
  ex.measure();
  const OwnTime time(work.bytes);
  if (!run(record.now())) return false;
  if (time.is_telling()) {
    const double cost = (time.passed() - ex.waited()).count() / double(work.bytes);
    one_way ? record.learn_of_writing(cost) : record.learn(cost);
  }
  record.now(next);
  return true;
}

}  // namespace nvx::kernel
