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
       return exchange(ex, ch, w.call, Exchange{w.send, w.recv, w.meets_all, w.meets});
     }},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (size_t(kRows[i].algorithm) != i) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

const char* name(Algorithm algorithm) { return kRows[size_t(algorithm)].name; }

bool launch_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const Work& work) {
  return kRows[size_t(algorithm)].run(ex, channel, work);
}

}  // namespace nvx::kernel
