#include <sys/resource.h>

#include "kernel/direct.h"
#include "kernel/launch.h"

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

/// How often this thread has lost its core to another one while it had work. The time of an operation that was
/// interrupted so tells nothing of how it wrote its data.
long interruptions() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

/// An operation of at least this many bytes may well be interrupted, and asking whether it was costs little beside it.
constexpr size_t kLasts = 64 << 10;

}  // namespace

const char* name(Algorithm algorithm) { return kRows[size_t(algorithm)].name; }

bool launch_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const Work& work) {
  const auto& run = kRows[size_t(algorithm)].run;
  CachePolicies& policies = channel.cache_policies();
  const bool small = work.bytes < CachePolicies::kLeastBytes, rooted = work.call.root >= 0;
  if (small || rooted || policies.only() || !ex.has_choice()) {
    ex.stage_by(policies.only() ? *policies.only() : small ? CachePolicy::kCached : policies.general());
    return run(ex, channel, work);
  }
  CachePolicyRecord& record = policies.record(size_t(algorithm), work.bytes);
  ex.stage_by(record.now());
  if (!channel.leads()) {
    if (!run(ex, channel, work)) return false;
    record.now(channel.told().next);
    policies.general(channel.told().general);
    return true;
  }
  const CachePolicy next = record.next();
  if (work.bytes >= CachePolicies::kLargeBytes)
    policies.general(record.far() ? CachePolicy::kPast : CachePolicy::kCached);
  channel.tell({next, policies.general()});
  ex.measure();
  const bool lasts = work.bytes >= kLasts;
  const long before = lasts ? interruptions() : 0;
  const auto began = Clock::now();
  if (!run(ex, channel, work)) return false;
  const std::chrono::duration<double> busy = Clock::now() - began - ex.waited();
  if (!lasts || interruptions() == before) record.learn(busy.count() / double(work.bytes));
  record.now(next);
  return true;
}

}  // namespace nvx::kernel
