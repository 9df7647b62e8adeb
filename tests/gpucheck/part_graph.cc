// Captured operations: replayed with other inputs in the same tensors, between eager ones, on the same channel.

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "gpucheck/parts.h"
#include "gpucheck/script.h"
#include "kernel/launch_cuda.h"

namespace nvx::gpucheck {
namespace {

/// A captured sequence of launches on one stream.
class Captured {
 public:
  Captured(const Stream& stream, const std::function<void()>& launches) {
    must(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      launches();
    } catch (...) {
      cudaGraph_t broken = nullptr;
      (void)cudaStreamEndCapture(stream.get(), &broken);
      throw;
    }
    must(cudaStreamEndCapture(stream.get(), &graph_), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&ready_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(ready_, stream.get()), "cudaGraphUpload");
  }
  ~Captured() {
    cudaGraphExecDestroy(ready_);
    cudaGraphDestroy(graph_);
  }
  Captured(const Captured&) = delete;
  void replay(const Stream& stream) const { must(cudaGraphLaunch(ready_, stream.get()), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

/// The same operations with inputs of another round; they lie where those of the first round lay.
std::vector<Act> acts_of(uint32_t ranks, const kernel::DeviceShape& shape, uint64_t round) {
  std::vector<Act> acts = some_acts(ranks, shape, 50);
  acts.resize(std::min<size_t>(acts.size(), 12));
  for (Act& act : acts) act.play.round = round;
  return acts;
}

/// Eager, then replays and eager ones in turns.
void mix(Report& report, const std::string& what, World& world,
         const std::function<void(const std::vector<Script>&)>& eager, const std::function<void()>& replay) {
  const uint32_t ranks = world.shape().ranks;
  for (uint64_t round = 2; round < 10 && report.has_time(); ++round) {
    std::vector<Script> scripts = world.write(acts_of(ranks, world.shape(), round));
    const bool is_eager = round % 3 == 0;
    if (is_eager) {
      eager(scripts);
    } else {
      world.fuse(scripts, ranks);  // the same list in the same place, as the capture left it
      replay();
    }
    if (const std::string wrong = world.wait(std::chrono::seconds(30)); !wrong.empty())
      throw Error(Code::kSystem, "nvx: " + what + ": " + wrong);
    report.check(what + (is_eager ? ", eager, round " : ", replayed, round ") + std::to_string(round),
                 world.verdict(scripts));
  }
}

void streams_of_their_own(Report& report, uint32_t ranks, uint32_t blocks) {
  World world({{ranks, blocks, 256, 2048}, 0, 0}, World::How::kBatches);
  std::vector<Script> first = world.write(acts_of(ranks, world.shape(), 1));
  std::vector<std::unique_ptr<Captured>> graphs;
  // A capture runs nothing: the channel is where it was.
  for (uint32_t r = 0; r < ranks; ++r) {
    graphs.push_back(std::make_unique<Captured>(world.stream(r), [&] {
      const Status status =
          kernel::launch_cuda(world.channel(r), first[r].jobs(), first[r].table(), world.stream(r).get());
      if (!status.ok()) throw Error(status.code(), status.what());
    }));
  }
  if (const std::string wrong = world.wait(std::chrono::seconds(5)); !wrong.empty())
    throw Error(Code::kSystem, "nvx: " + wrong);
  mix(
      report, "a graph a rank", world, [&](const std::vector<Script>& scripts) { world.launch(scripts, ranks); },
      [&] {
        for (uint32_t r = 0; r < ranks; ++r) graphs[r]->replay(world.stream(r));
      });
}

void fused(Report& report, uint32_t ranks, uint32_t blocks) {
  World world({{ranks, blocks, 256, 2048}, 0, 0}, World::How::kFused);
  std::vector<Script> first = world.write(acts_of(ranks, world.shape(), 1));
  const kernel::FusedRank* const at = world.fuse(first, ranks);
  std::unique_ptr<Captured> graph;
  try {
    graph = std::make_unique<Captured>(world.stream(0), [&] {
      const Status status = kernel::launch_fused(at, ranks, blocks, world.stream(0).get());
      if (!status.ok()) throw Error(status.code(), status.what());
    });
  } catch (const Error& error) {
    // Not nvx's to promise: only tests launch so.
    report.say(Line().add("left_out", "a fused launch in a graph").add("why", error.reason()));
    return;
  }
  mix(
      report, "a fused launch", world, [&](const std::vector<Script>& scripts) { world.launch(scripts, ranks); },
      [&] { graph->replay(world.stream(0)); });
}

}  // namespace

int graph(const PartOptions& options) {
  Report report("graph", options.span);
  const uint32_t resident = resident_blocks();
  for (const uint32_t ranks : options.ranks.empty() ? std::vector<uint32_t>{2, 4} : options.ranks) {
    const uint32_t blocks = std::min(2u, resident / ranks);
    if (blocks == 0) continue;
    streams_of_their_own(report, ranks, blocks);
    fused(report, ranks, blocks);
  }
  return report.finish();
}

}  // namespace nvx::gpucheck
