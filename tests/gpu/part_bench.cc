// The time of operations by size, ranks and algorithm: in graphs of the kernels of a group, a stream a rank. As
// baselines: an empty launch, a round of flags, and a plain copy.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <span>

#include "base/error.h"
#include "gpu/control.h"
#include "gpu/parts.h"
#include "gpu/rank_program.h"
#include "gpu/without.h"
#include "group/plan/device_plan.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::Job;

constexpr size_t kMost = size_t(64) << 20;  // size of the largest message in bytes

void must_launch(int error, const char* what) { must(cudaError_t(error), what); }

/// In-place all-reduces of floats by all ranks on one device, each on a stream of its own, as a group launches them.
/// The values are zero, so repetition does not change them.
class Bench {
 public:
  Bench(const kernel::DeviceShape& shape, size_t most_bytes)
      : world_({shape, 0, 0}, World::How::kStreams, /*heap_bytes=*/1 << 20),
        tensors_(shape.ranks * most_bytes),
        most_bytes_(most_bytes) {}

  size_t pad_bytes() const { return world_.pad_bytes(); }
  const kernel::DeviceShape& shape() const { return world_.shape(); }

  bool can(DeviceAlgorithm algorithm, size_t bytes) const {
    return kernel::can_do(algorithm, job_of(algorithm, bytes, 0), world_.shape(), nullptr);
  }

  /// The sorted times from the start of the last rank's kernel, this long after the others', to the end of rank 0's.
  std::vector<double> late_us(DeviceAlgorithm algorithm, size_t bytes, std::chrono::microseconds late) {
    const uint32_t last = shape().ranks - 1;
    std::vector<double> us;
    const auto launch = [&](uint32_t r) {
      const Status status =
          launch_without(Without::kNothing, world_.channel(r), job_of(algorithm, bytes, r), world_.stream(r).get());
      if (!status.ok()) throw Error(status.code(), status.what());
    };
    for (int round = -2; round < 15; ++round) {  // the first rounds are warm-up
      Timer timer;
      for (uint32_t r = 0; r < last; ++r) launch(r);
      timer.stop(world_.stream(0));
      const auto ns = uint64_t(std::chrono::nanoseconds(late).count());
      must_launch(launch_sleep(ns, world_.stream(last).get()), "a late rank");
      timer.start(world_.stream(last));
      launch(last);
      await_all();
      if (round >= 0) us.push_back(timer.us());
    }
    std::ranges::sort(us);
    return us;
  }

  /// The time of one of many operations in a graph. The time to launch the graphs is in a short and in a long one, and
  /// their difference does not have it.
  double us(DeviceAlgorithm algorithm, size_t bytes, Without without = Without::kNothing) {
    const int few = 4, many = bytes <= (1 << 20) ? 104 : 24;
    return (time_of_graphs(algorithm, bytes, without, many) - time_of_graphs(algorithm, bytes, without, few)) /
           (many - few);
  }

 private:
  /// The median time of a replay of `count` operations by every rank.
  double time_of_graphs(DeviceAlgorithm algorithm, size_t bytes, Without without, int count) {
    std::vector<std::unique_ptr<Captured>> graphs;
    for (uint32_t r = 0; r < shape().ranks; ++r) {
      const Job job = job_of(algorithm, bytes, r);
      graphs.push_back(std::make_unique<Captured>(world_.stream(r), [&] {
        for (int i = 0; i < count; ++i) {
          const Status status = launch_without(without, world_.channel(r), job, world_.stream(r).get());
          if (!status.ok()) throw Error(status.code(), status.what());
        }
      }));
    }
    std::vector<double> us;
    for (int round = -2; round < 9; ++round) {  // the first rounds are warm-up
      Timer timer;
      timer.start(world_.stream(0));
      for (uint32_t r = 0; r < shape().ranks; ++r) graphs[r]->replay(world_.stream(r));
      timer.stop(world_.stream(0));
      await_all();
      if (round >= 0) us.push_back(timer.us());
    }
    std::nth_element(us.begin(), us.begin() + long(us.size() / 2), us.end());
    return us[us.size() / 2];
  }

  /// Throws Error unless the kernels of all ranks have ended well.
  void await_all() {
    if (const std::string wrong = world_.wait(std::chrono::seconds(30)); !wrong.empty())
      throw Error(Code::kTimeout, "nvx: " + wrong);
    for (uint32_t r = 0; r < shape().ranks; ++r) {
      if (const std::string wrong = verdict_of(world_.control(r)); !wrong.empty())
        throw Error(Code::kSystem, "nvx: " + wrong);
    }
  }

  Job job_of(DeviceAlgorithm algorithm, size_t bytes, uint32_t rank) const {
    kernel::CollectiveArgs args;
    std::byte* const tensor = tensors_.data() + rank * most_bytes_;
    args.call.fingerprint = {Collective::kAllReduce, DType::kF32, ReduceOp::kSum, {}, -1, bytes / 4, 0, 0};
    args.in = tensor, args.out = tensor, args.count = bytes / 4;
    Job job = kernel::job_of(algorithm, args, rank, world_.shape().ranks, 4, 0, nullptr);
    job.timeout_ns = kTimeoutNs;
    return job;
  }

  World world_;
  Memory tensors_;
  size_t most_bytes_;
};

constexpr DeviceAlgorithm kAlgorithms[] = {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot,
                                           DeviceAlgorithm::kReduceChunks};

/// The bytes that one rank sends to the others.
double sent_bytes(DeviceAlgorithm algorithm, size_t bytes, uint32_t ranks) {
  // Half of each packet is stamps. In one step, the whole input goes to each peer; in two, a slice in each step.
  const double slices = 2.0 * double(bytes) * (ranks - 1) / ranks;
  if (algorithm == DeviceAlgorithm::kReducePackets) return 2.0 * double(bytes) * (ranks - 1);
  return algorithm == DeviceAlgorithm::kReducePacketsTwoShot ? 2 * slices : slices;
}

/// Times one operation and adds a row. False: no time is left.
bool time_one(Report& report, Bench& bench, const char* row, DeviceAlgorithm algorithm, size_t bytes, bool is_chosen,
              Without without = Without::kNothing) {
  const kernel::DeviceShape& shape = bench.shape();
  if (!report.has_time()) {
    report.cut_short(std::string(short_name(algorithm)) + " of " + std::to_string(shape.ranks) + " ranks, " +
                     std::to_string(bytes) + " bytes");
    return false;
  }
  const double us = bench.us(algorithm, bytes, without), sent = sent_bytes(algorithm, bytes, shape.ranks);
  report.check("timed", "");
  Line line;
  line.add(row, "all_reduce").add("algorithm", short_name(algorithm)).add("ranks", shape.ranks);
  line.add("blocks", shape.blocks).add("packets", shape.packets).add("chunk_bytes", shape.chunk_bytes);
  line.add("pad_bytes", uint64_t(bench.pad_bytes())).add("bytes", uint64_t(bytes)).add("graph_us", us);
  line.add("bus_gb_s", 2.0 * double(bytes) * (shape.ranks - 1) / shape.ranks / us / 1e3);
  line.add("processor_gb_s_each_way", sent / shape.blocks / us / 1e3).add("chosen", is_chosen);
  if (without != Without::kNothing) line.add("without", name_of(without));
  report.print(line);
  return true;
}

/// The time of one of many kernels in a graph, which has no cost of the host's launches.
double in_graph_us(const Stream& stream, const std::function<void()>& launch) {
  const int few = 4, many = 104;
  const auto us = [&](int count) {
    const Captured graph(stream, [&] {
      for (int i = 0; i < count; ++i) launch();
    });
    return time_of(stream, 1, 9, [&] { graph.replay(stream); });
  };
  return (us(many) - us(few)) / (many - few);
}

/// The times of flag rounds, for as many ranks and blocks.
void bench_control(Report& report, uint32_t ranks, uint32_t blocks) {
  const Stream stream;
  const Memory lines(control_bytes(ranks, blocks)), late(sizeof(uint32_t), Memory::Where::kPinned);
  const auto launch = [&](uint32_t rounds) {
    const ControlRounds control{reinterpret_cast<ControlLine*>(lines.data()), ranks, blocks, rounds,
                                reinterpret_cast<uint32_t*>(late.data())};
    must_launch(launch_rounds(control, stream.get()), "flag rounds");
  };
  const auto us = [&](uint32_t rounds) { return time_of(stream, 200, 7, [&] { launch(rounds); }); };
  const auto in_graph = [&](uint32_t rounds) { return in_graph_us(stream, [&] { launch(rounds); }); };
  const double few = us(8), many = us(72);
  const bool in_time = *reinterpret_cast<const uint32_t*>(late.data()) == 0;
  report.check("flag rounds of " + std::to_string(ranks) + " ranks", in_time ? "" : "one took more than five seconds");
  report.print(Line()
                   .add("control", "flag_round")
                   .add("ranks", ranks)
                   .add("blocks", blocks)
                   .add("launch_2_us", us(2))
                   .add("graph_0_us", in_graph(0))
                   .add("graph_1_us", in_graph(1))
                   .add("graph_2_us", in_graph(2))
                   .add("round_us", (many - few) / 64));
}

struct Spot {
  uint32_t blocks;
  uint32_t packets;
  uint32_t chunk_bytes;
};

/// One channel, with every size and algorithm that it supports.
void bench_channel(Report& report, uint32_t ranks, const Spot& spot, std::span<const size_t> sizes) {
  Bench bench({ranks, spot.blocks, spot.packets, spot.chunk_bytes}, sizes.back());
  for (const size_t bytes : sizes) {
    for (const DeviceAlgorithm algorithm : kAlgorithms) {
      if (!bench.can(algorithm, bytes) || (algorithm == DeviceAlgorithm::kReduceChunks && bytes < 4096)) continue;
      time_one(report, bench, "bench", algorithm, bytes, /*is_chosen=*/false);
    }
  }
}

/// Every size with the algorithm that a group chooses, and with the others that can do it.
void bench_product(Report& report, Bench& bench) {
  constexpr size_t kSizes[] = {8,         1024,    16 << 10, 64 << 10, 128 << 10, 256 << 10,
                               512 << 10, 1 << 20, 4 << 20,  16 << 20, kMost};
  for (const size_t bytes : kSizes) {
    if (bytes > kMost / bench.shape().ranks) continue;
    const DeviceAlgorithm chosen = plan(Collective::kAllReduce, bytes, {.shape = bench.shape()}).algorithm;
    for (const DeviceAlgorithm algorithm : kAlgorithms) {
      const bool is_near = algorithm != DeviceAlgorithm::kReduceChunks || bytes >= (64 << 10);
      if (algorithm == chosen || (is_near && bench.can(algorithm, bytes)))
        time_one(report, bench, "product", algorithm, bytes, algorithm == chosen);
    }
  }
}

/// A small and a large operation without what costs them time.
void bench_without(Report& report, Bench& bench) {
  for (const Without without : {Without::kHostWrites, Without::kFences}) {
    time_one(report, bench, "product", DeviceAlgorithm::kReducePackets, 8, /*is_chosen=*/false, without);
    time_one(report, bench, "product", DeviceAlgorithm::kReduceChunks, 1 << 20, /*is_chosen=*/false, without);
  }
}

/// The time of an operation from when its late rank begins: until then the other ranks wait, and check the host's word.
void bench_late(Report& report, Bench& bench) {
  // At 16 KiB lanes of many warps wait.
  for (const auto& [late, bytes] : std::vector<std::pair<int, size_t>>{
           {0, 8}, {50, 8}, {150, 8}, {1000, 8}, {0, 16 << 10}, {150, 16 << 10}, {1000, 16 << 10}}) {
    if (!report.has_time()) return report.cut_short("an operation with a late rank");
    const std::vector<double> us =
        bench.late_us(DeviceAlgorithm::kReducePackets, bytes, std::chrono::microseconds(late));
    report.print(Line()
                     .add("late", "all_reduce")
                     .add("bytes", bytes)
                     .add("ranks", bench.shape().ranks)
                     .add("blocks", bench.shape().blocks)
                     .add("late_us", late)
                     .add("us", us[us.size() / 2])
                     .add("most_us", us.back()));
  }
}

/// Kernels that do nothing, with as many bytes of arguments as operations have, or without.
void bench_empty(Report& report) {
  const Stream stream;
  for (const uint32_t blocks : {1u, uint32_t(Tuning().of(Tune::kBlocks, 8))}) {
    for (const size_t arguments : {size_t(0), kArgumentBytes}) {
      const auto launch = [&] { must_launch(launch_empty(blocks, stream.get(), arguments != 0), "an empty launch"); };
      Line line;
      line.add("control", "empty_launch").add("blocks", blocks).add("argument_bytes", uint64_t(arguments));
      report.print(line.add("launch_us", time_of(stream, 500, 9, launch)).add("graph_us", in_graph_us(stream, launch)));
    }
  }
}

}  // namespace

int bench(const PartOptions& options) {
  Report report("bench", options.span);
  const uint32_t resident = resident_blocks();
  bench_empty(report);
  std::vector<uint32_t> ranks = options.ranks.empty() ? std::vector<uint32_t>{8, 2, 4} : options.ranks;
  constexpr size_t kSmall[] = {8, 64, 512, 1024, 4096, 16384, 65536, 262144};
  constexpr size_t kLarge[] = {1 << 20, 4 << 20, 16 << 20, kMost};
  // A block of a one-shot holds half a packet a byte from each rank. The small channels hold every size up to 16 KiB.
  const Spot small[] = {{1, 2048, 4096}, {2, 1024, 4096}, {4, 1024, 8192}, {8, 2048, 8192}};
  const Spot large[] = {{4, 64, 8 << 10},  {4, 64, 16 << 10},  {4, 64, 32 << 10},  {4, 64, 64 << 10},
                        {8, 64, 32 << 10}, {16, 64, 16 << 10}, {16, 64, 64 << 10}, {32, 64, 16 << 10}};
  for (const uint32_t n : ranks) {
    for (const Spot& spot : small) {
      if (n * spot.blocks > resident || !report.has_time()) continue;
      bench_control(report, n, spot.blocks);
      bench_channel(report, n, spot, kSmall);
    }
    for (const Spot& spot : large) {
      if (n * spot.blocks <= resident) bench_channel(report, n, spot, kLarge);
    }
  }
  return report.finish();
}

int product(const PartOptions& options) {
  Report report("product", options.span);
  const uint32_t resident = resident_blocks();
  for (const uint32_t n : options.ranks.empty() ? std::vector<uint32_t>{8, 2, 4, 16, 32} : options.ranks) {
    std::vector<uint32_t> blocks{product_shape(n).blocks};  // and others for comparison
    for (const uint32_t other : {16u, 32u}) {
      if (other != blocks[0] && n * other <= resident) blocks.push_back(other);
    }
    for (const uint32_t b : blocks) {
      Bench bench(product_shape(n, b), kMost / n);
      if (b == blocks[0]) bench_late(report, bench);
      bench_product(report, bench);
      if (b == blocks[0]) bench_without(report, bench);
    }
  }
  return report.finish();
}

/// The host's time of the calls that a launch consists of.
int host_calls(const PartOptions& options) {
  Report report("host_calls", options.span);
  constexpr int kCalls = 100;
  World world({{2, 4, 256, 2048}, 0, 0}, World::How::kStreams, /*heap_bytes=*/1 << 20);
  const Stream stream, other;
  kernel::TailEvent tail;
  cudaEvent_t event = nullptr;
  must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  const auto demand = [](const Status& status) {
    if (!status.ok()) throw Error(status.code(), status.what());
  };
  demand(tail.record(stream.get(), false));
  struct Call {
    const char* name;
    std::function<void()> call;
  };
  const Call calls[] = {
      {"an empty launch", [&] { must_launch(launch_empty(1, stream.get()), "an empty launch"); }},
      {"cudaEventRecord", [&] { must(cudaEventRecord(event, stream.get()), "cudaEventRecord"); }},
      {"cudaStreamWaitEvent", [&] { must(cudaStreamWaitEvent(other.get(), event, 0), "cudaStreamWaitEvent"); }},
      {"cudaEventQuery", [&] { (void)cudaEventQuery(event); }},
      {"capture_of", [&] { (void)kernel::capture_of(stream.get()); }},
      {"TailEvent::record", [&] { demand(tail.record(stream.get(), false)); }},
      {"TailEvent::block", [&] { demand(tail.block(other.get(), false)); }},
  };
  for (const Call& one : calls) {
    std::vector<double> us;
    for (int round = -1; round < 9; ++round) {
      const auto began = Clock::now();
      for (int i = 0; i < kCalls; ++i) one.call();
      const double took = std::chrono::duration<double, std::micro>(Clock::now() - began).count() / kCalls;
      must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      if (round >= 0) us.push_back(took);
    }
    std::nth_element(us.begin(), us.begin() + long(us.size() / 2), us.end());
    report.check(one.name, "");
    report.print(Line().add("host_call", one.name).add("us", us[us.size() / 2]));
  }
  must(cudaEventDestroy(event), "cudaEventDestroy");
  return report.finish();
}

int copies(const PartOptions& options) {
  Report report("copies", options.span);
  constexpr size_t kLargest = size_t(256) << 20;
  const Stream stream;
  const Memory from(kLargest), to(kLargest), host(size_t(64) << 20, Memory::Where::kPinned);
  struct Way {
    const char* name;
    std::byte* to;
    const std::byte* from;
    size_t most;
  };
  const Way ways[] = {{"device_to_device", to.data(), from.data(), kLargest},
                      {"host_to_device", to.data(), host.data(), host.bytes()},
                      {"device_to_host", host.data(), from.data(), host.bytes()}};
  for (const Way& way : ways) {
    for (size_t bytes = 8; bytes <= way.most; bytes = bytes < 4096 ? 4096 : bytes * 16) {
      const int times = bytes <= (1 << 20) ? 200 : 10;
      const double us = time_of(stream, times, 7, [&] {
        must(cudaMemcpyAsync(way.to, way.from, bytes, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
      });
      report.check(way.name, "");
      report.print(Line()
                       .add("copy", way.name)
                       .add("bytes", uint64_t(bytes))
                       .add("us", us)
                       .add("gb_s", double(bytes) / us / 1e3));
    }
  }
  const double us =
      time_of(stream, 10, 7, [&] { must(cudaMemsetAsync(to.data(), 0, kLargest, stream.get()), "cudaMemsetAsync"); });
  report.print(Line()
                   .add("copy", "fill")
                   .add("bytes", uint64_t(kLargest))
                   .add("us", us)
                   .add("gb_s", double(kLargest) / us / 1e3));
  return report.finish();
}

}  // namespace nvx::gpu
