// Captured operations on one channel: replays with other inputs in the same tensors, between eager operations; and
// streams that are ordered only by the tail of the channel.

#include <cuda_runtime_api.h>

#include <array>
#include <memory>

#include "base/error.h"
#include "gpu/control.h"
#include "gpu/parts.h"
#include "gpu/rank_program.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

/// The same operations with the inputs of another round, at the addresses of the first round.
std::vector<Case> cases_of(uint32_t ranks, const kernel::DeviceShape& shape, uint64_t round) {
  std::vector<Case> cases = some_cases(ranks, shape, 50);
  cases.resize(std::min<size_t>(cases.size(), 12));
  for (Case& test_case : cases) test_case.spec.round = round;
  return cases;
}

/// Runs eager operations, then replays and eager ones in turn.
void mix(Report& report, const std::string& what, World& world,
         const std::function<void(const std::vector<RankProgram>&)>& eager, const std::function<void()>& replay) {
  const uint32_t ranks = world.shape().ranks;
  for (uint64_t round = 2; round < 10 && report.has_time(); ++round) {
    std::vector<RankProgram> programs = world.write(cases_of(ranks, world.shape(), round));
    const bool is_eager = round % 3 == 0;
    if (is_eager) {
      eager(programs);
    } else {
      world.fuse(programs, ranks);  // the same list at the same address as at the capture
      replay();
    }
    if (const std::string wrong = world.wait(std::chrono::seconds(30)); !wrong.empty())
      throw Error(Code::kSystem, "nvx: " + what + ": " + wrong);
    report.check(what + (is_eager ? ", eager, round " : ", replayed, round ") + std::to_string(round),
                 world.verdict(programs));
  }
}

void streams_of_their_own(Report& report, uint32_t ranks, uint32_t blocks) {
  World world({{ranks, blocks, 256, 2048}, 0, 0}, World::How::kBatches);
  std::vector<RankProgram> first = world.write(cases_of(ranks, world.shape(), 1));
  std::vector<std::unique_ptr<Captured>> graphs;
  // A capture runs nothing, so the channel has not advanced.
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
      report, "a graph a rank", world, [&](const std::vector<RankProgram>& programs) { world.launch(programs, ranks); },
      [&] {
        for (uint32_t r = 0; r < ranks; ++r) graphs[r]->replay(world.stream(r));
      });
}

void fused(Report& report, uint32_t ranks, uint32_t blocks) {
  World world({{ranks, blocks, 256, 2048}, 0, 0}, World::How::kFused);
  std::vector<RankProgram> first = world.write(cases_of(ranks, world.shape(), 1));
  const FusedRank* const at = world.fuse(first, ranks);
  std::unique_ptr<Captured> graph;
  try {
    graph = std::make_unique<Captured>(world.stream(0), [&] {
      const Status status = launch_fused(at, ranks, blocks, world.stream(0).get());
      if (!status.ok()) throw Error(status.code(), status.what());
    });
  } catch (const Error& error) {
    // nvx does not guarantee this: only the tests launch so.
    report.print(Line().add("left_out", "a fused launch in a graph").add("why", error.reason()));
    return;
  }
  mix(
      report, "a fused launch", world, [&](const std::vector<RankProgram>& programs) { world.launch(programs, ranks); },
      [&] { graph->replay(world.stream(0)); });
}

/// One rank's operations in three thirds, each on its own stream: two in graphs, the last one eager.
class Thirds {
 public:
  Thirds(World& world, uint32_t rank, const RankProgram& program) : world_(world), rank_(rank) {
    for (size_t third = 0; third < graphs_.size(); ++third) {
      graphs_[third] = std::make_unique<Captured>(stream(third), [&] { put(program, third, /*capture=*/third + 1); });
    }
  }

  const Stream& stream(size_t third) const { return third == 0 ? world_.stream(rank_) : more_[third - 1]; }

  /// Each graph is also replayed on the stream of the other.
  void begin(const RankProgram& program, bool eager_first) {
    if (eager_first) put(program, 2, /*capture=*/0);
    for (size_t i = 0; i < graphs_.size(); ++i) graphs_[i]->replay(stream(eager_first ? 1 - i : i));
    if (!eager_first) put(program, 2, /*capture=*/0);
  }

 private:
  void put(const RankProgram& program, size_t third, uint64_t capture) {
    const size_t count = program.jobs().size() / 3;
    cudaStream_t on = stream(third).get();
    demand(tail_.block(on, capture != 0));
    demand(program.launch_some(world_.channel(rank_), third * count, count, on));
    demand(tail_.record(on, capture));
  }
  static void demand(const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.what());
  }

  World& world_;
  const uint32_t rank_;
  std::array<Stream, 2> more_;
  kernel::TailEvent tail_;
  std::array<std::unique_ptr<Captured>, 2> graphs_;
};

/// One rank's first stream is busy. Its operations still run in the order of their calls; otherwise that rank would
/// meet the others in a different operation.
void across_streams(Report& report, uint32_t ranks, uint32_t blocks) {
  World world({{ranks, blocks, 256, 2048}, 0, 0}, World::How::kBatches);
  std::vector<RankProgram> first = world.write(cases_of(ranks, world.shape(), 1));
  std::vector<std::unique_ptr<Thirds>> thirds;
  for (uint32_t r = 0; r < ranks; ++r) thirds.push_back(std::make_unique<Thirds>(world, r, first[r]));
  for (uint64_t round = 2; round < 2 + 2 * uint64_t(ranks) && report.has_time(); ++round) {
    const bool eager_first = round % 2 == 0;
    const uint32_t late = uint32_t(round / 2) % ranks;
    std::vector<RankProgram> programs = world.write(cases_of(ranks, world.shape(), round));
    must(cudaError_t(launch_sleep(20'000'000, thirds[late]->stream(eager_first ? 2 : 0).get())),
         "a kernel that sleeps");
    for (uint32_t r = 0; r < ranks; ++r) thirds[r]->begin(programs[r], eager_first);
    std::string wrong = world.wait(std::chrono::seconds(30));
    for (uint32_t r = 0; wrong.empty() && r < ranks; ++r) {
      for (const size_t third : {1, 2}) wrong += thirds[r]->stream(third).wait(std::chrono::seconds(30));
    }
    if (!wrong.empty()) throw Error(Code::kSystem, "nvx: across streams: " + wrong);
    report.check("across streams, " + std::string(eager_first ? "eager first, rank " : "graphs first, rank ") +
                     std::to_string(late) + " late, " + std::to_string(ranks) + " ranks",
                 world.verdict(programs));
  }
}

}  // namespace

int graph(const PartOptions& options) {
  Report report("graph", options.span);
  const uint32_t resident = resident_blocks();
  for (const uint32_t ranks : options.ranks.empty() ? std::vector<uint32_t>{2, 4} : options.ranks) {
    const uint32_t blocks = std::min(2u, resident / ranks);
    if (blocks == 0) continue;
    streams_of_their_own(report, ranks, blocks);
    across_streams(report, ranks, blocks);
    fused(report, ranks, blocks);
  }
  return report.finish();
}

}  // namespace nvx::gpu
