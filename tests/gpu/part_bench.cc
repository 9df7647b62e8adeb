// Kernel time by size, ranks and algorithm, with all ranks fused in a launch. As baselines: an empty launch, a round of
// flags, and a plain copy.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <span>

#include "base/error.h"
#include "gpu/control.h"
#include "gpu/parts.h"
#include "gpu/script.h"
#include "group/plan/device_plan.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::Job;

constexpr size_t kMost = size_t(64) << 20;  // size of the largest message in bytes

void must_launch(int error, const char* what) { must(cudaError_t(error), what); }

/// In-place all-reduces of floats over all ranks on one device. The values are zero, so repetition does not change
/// them.
class FusedBench {
 public:
  FusedBench(const kernel::DeviceShape& shape, size_t most_bytes)
      : world_({shape, 0, 0}, World::How::kFused, /*heap_bytes=*/1 << 20),
        tensors_(shape.ranks * most_bytes),
        most_bytes_(most_bytes) {}

  size_t pad_bytes() const { return world_.pad_bytes(); }

  bool can(DeviceAlgorithm algorithm, size_t bytes) const {
    const Job job = job_of(algorithm, bytes, 0);
    return kernel::can_do(algorithm, job, world_.shape(), nullptr);
  }

  /// The time of one launch of `jobs` operations a rank.
  double us(DeviceAlgorithm algorithm, size_t bytes, uint32_t jobs, int times) {
    world_.heap().reset();
    const uint32_t ranks = world_.shape().ranks;
    std::vector<FusedRank> fused;
    for (uint32_t r = 0; r < ranks; ++r) {
      const std::vector<Job> list(jobs, job_of(algorithm, bytes, r));
      fused.push_back(
          {world_.channel(r).prepared(), reinterpret_cast<const Job*>(bring(std::span(list))), jobs, nullptr});
    }
    const auto* at = reinterpret_cast<const FusedRank*>(bring(std::span(fused)));
    const double us = time_of(world_.stream(0), times, 5, [&] {
      const Status status = launch_fused(at, ranks, world_.shape().blocks, world_.stream(0).get());
      if (!status.ok()) throw Error(status.code(), status.what());
    });
    for (uint32_t r = 0; r < ranks; ++r) {
      if (const std::string told = verdict_of(world_.control(r)); !told.empty())
        throw Error(Code::kSystem, "nvx: " + told);
    }
    return us;
  }

 private:
  Job job_of(DeviceAlgorithm algorithm, size_t bytes, uint32_t rank) const {
    kernel::Work work;
    std::byte* const tensor = tensors_.data() + rank * most_bytes_;
    work.call.fingerprint = {Collective::kAllReduce, DType::kF32, ReduceOp::kSum, {}, -1, bytes / 4, 0, 0};
    work.in = tensor, work.out = tensor, work.count = bytes / 4;
    Job job = kernel::job_of(algorithm, work, rank, world_.shape().ranks, 4, 0, nullptr);
    job.patience_ns = kPatienceNs;
    return job;
  }
  template <class T>
  std::byte* bring(std::span<T> list) {
    std::byte* const at = world_.heap().take(list.size_bytes());
    must(cudaMemcpy(at, list.data(), list.size_bytes(), cudaMemcpyDefault), "cudaMemcpy");
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return at;
  }

  World world_;
  Memory tensors_;
  size_t most_bytes_;
};

/// The time of an empty launch and of launches of flag rounds, for as many ranks and blocks.
void bench_control(Report& report, uint32_t ranks, uint32_t blocks) {
  const Stream stream;
  const Memory lines(control_bytes(ranks, blocks)), late(sizeof(uint32_t), Memory::Where::kPinned);
  const auto us = [&](uint32_t rounds) {
    const ControlRounds control{reinterpret_cast<ControlLine*>(lines.data()), ranks, blocks, rounds,
                                reinterpret_cast<uint32_t*>(late.data())};
    return time_of(stream, 200, 7, [&] { must_launch(launch_rounds(control, stream.get()), "flag rounds"); });
  };
  const double none = us(0), one = us(1), two = us(2), few = us(8), many = us(72);
  const bool in_time = *reinterpret_cast<const uint32_t*>(late.data()) == 0;
  report.check("flag rounds of " + std::to_string(ranks) + " ranks", in_time ? "" : "one took more than five seconds");
  report.say(Line()
                 .add("control", "flag_round")
                 .add("ranks", ranks)
                 .add("blocks", blocks)
                 .add("launch_0_us", none)
                 .add("launch_1_us", one)
                 .add("launch_2_us", two)
                 .add("round_us", (many - few) / 64));
}

struct Spot {
  uint32_t blocks;
  uint32_t packets;
  uint32_t chunk_bytes;
};

/// One channel, with every size and algorithm that it supports.
void bench_channel(Report& report, uint32_t ranks, const Spot& spot, std::span<const size_t> sizes) {
  FusedBench bench({ranks, spot.blocks, spot.packets, spot.chunk_bytes}, sizes.back());
  for (const size_t bytes : sizes) {
    for (const DeviceAlgorithm algorithm :
         {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot, DeviceAlgorithm::kReduceChunks}) {
      if (!bench.can(algorithm, bytes)) continue;
      if (algorithm == DeviceAlgorithm::kReduceChunks && bytes < 4096) continue;
      if (!report.has_time()) {
        report.cut_short(std::string(short_name(algorithm)) + ", " + std::to_string(bytes) + " bytes");
        continue;
      }
      const int times = bytes <= (1 << 16) ? 200 : bytes <= (1 << 20) ? 50 : 5;
      const double launch = bench.us(algorithm, bytes, 1, times);
      const double inside =
          bytes <= (1 << 20) ? (bench.us(algorithm, bytes, 33, 5) - bench.us(algorithm, bytes, 1, 20)) / 32 : -1;
      report.check("timed", "");
      Line line;
      line.add("bench", "all_reduce").add("algorithm", short_name(algorithm)).add("ranks", ranks);
      line.add("blocks", spot.blocks).add("bytes", uint64_t(bytes)).add("launch_us", launch);
      if (inside >= 0) line.add("inside_us", inside);
      report.say(line.add("pad_bytes", uint64_t(bench.pad_bytes())));
    }
  }
}

}  // namespace

int bench(const PartOptions& options) {
  Report report("bench", options.span);
  const uint32_t resident = resident_blocks();
  const Stream stream;
  const double empty = time_of(stream, 500, 9, [&] { must_launch(launch_empty(1, stream.get()), "an empty launch"); });
  report.say(Line().add("control", "empty_launch").add("launch_us", empty));
  std::vector<uint32_t> ranks = options.ranks.empty() ? std::vector<uint32_t>{8, 2, 4} : options.ranks;
  constexpr size_t kSmall[] = {8, 64, 512, 1024, 4096, 16384, 65536, 262144};
  constexpr size_t kLarge[] = {1 << 20, 4 << 20, 16 << 20, kMost};
  // A block of a one-shot holds half a packet a byte from each rank. The small channels hold every size up to 16 KiB.
  const Spot small[] = {{1, 2048, 4096}, {2, 1024, 4096}, {4, 1024, 8192}, {8, 2048, 8192}};
  const Spot large[] = {
      {4, 64, 32 << 10}, {8, 64, 32 << 10}, {16, 64, 16 << 10}, {16, 64, 64 << 10}, {32, 64, 16 << 10}};
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
  constexpr uint32_t kWanted = 16;  // the choice of a group, if the device has room
  constexpr size_t kArena = size_t(64) << 20;
  constexpr size_t kSizes[] = {8, 1024, 16 << 10, 128 << 10, 512 << 10, 4 << 20, kMost};
  const uint32_t resident = resident_blocks();
  std::vector<uint32_t> ranks = options.ranks;
  for (uint32_t n = 2; options.ranks.empty() && n <= std::min(resident, 64u); n *= 2) ranks.push_back(n);
  for (const uint32_t n : ranks) {
    const uint32_t blocks = std::min(kWanted, resident / n);
    const kernel::DeviceShape shape = device_shape(n, blocks, pad_budget(kArena));
    FusedBench bench(shape, kMost / n);
    for (const size_t bytes : kSizes) {
      if (bytes > kMost / n) continue;
      const DeviceAlgorithm algorithm = plan(Collective::kAllReduce, bytes, {.shape = shape}).algorithm;
      if (!report.has_time()) {
        report.cut_short(std::to_string(n) + " ranks, " + std::to_string(bytes) + " bytes");
        continue;
      }
      const int times = bytes <= (1 << 16) ? 100 : bytes <= (1 << 20) ? 20 : 5;
      const double us = bench.us(algorithm, bytes, 1, times);
      // Half of each packet is stamps. In one step, the whole input goes to each peer; in two, a slice in each step.
      const double sent = algorithm == DeviceAlgorithm::kReducePackets
                              ? 2.0 * bytes * (n - 1)
                              : 2.0 * bytes * (n - 1) / n * (algorithm == DeviceAlgorithm::kReduceChunks ? 1 : 2);
      report.check("timed", "");
      report.say(Line()
                     .add("product", "all_reduce")
                     .add("algorithm", short_name(algorithm))
                     .add("ranks", n)
                     .add("blocks", blocks)
                     .add("packets", shape.packets)
                     .add("chunk_bytes", shape.chunk_bytes)
                     .add("pad_bytes", uint64_t(bench.pad_bytes()))
                     .add("bytes", uint64_t(bytes))
                     .add("launch_us", us)
                     .add("processor_gb_s_each_way", sent / blocks / us / 1e3));
    }
  }
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
      report.say(Line()
                     .add("copy", way.name)
                     .add("bytes", uint64_t(bytes))
                     .add("us", us)
                     .add("gb_s", double(bytes) / us / 1e3));
    }
  }
  const double us =
      time_of(stream, 10, 7, [&] { must(cudaMemsetAsync(to.data(), 0, kLargest, stream.get()), "cudaMemsetAsync"); });
  report.say(Line()
                 .add("copy", "fill")
                 .add("bytes", uint64_t(kLargest))
                 .add("us", us)
                 .add("gb_s", double(kLargest) / us / 1e3));
  return report.finish();
}

}  // namespace nvx::gpu
