// The kernels on a device, with all ranks of a group in one cooperative launch: the code that
// device_collectives_test.cc runs on threads, over plain memory of one device. Skipped with a message if there is none.

#include <gtest/gtest.h>

#include "gpu/fused.h"
#include "support/device.h"

namespace nvx::test {
namespace {

using gpu::FusedRank;
using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceShape;
using kernel::Job;
using kernel::Piece;

/// A channel of several ranks on one device, which run in one launch.
class Fused {
 public:
  Fused(const DeviceShape& shape, uint32_t first_epoch) : ranks_(shape, first_epoch) {}

  kernel::Control& control(uint32_t rank) { return ranks_.control(rank); }

  /// Runs one spec on the ranks [0, present). Returns an empty text if all outputs are correct.
  std::string run(DeviceAlgorithm algorithm, const Spec& spec, uint32_t present, uint64_t timeout_ns) {
    std::vector<std::unique_ptr<KernelExecutor>> sides;
    std::vector<std::unique_ptr<DeviceMemory>> held;
    std::vector<FusedRank> ranks;
    for (uint32_t r = 0; r < present; ++r) {
      sides.push_back(std::make_unique<KernelExecutor>(spec, r, ranks_.shape().ranks));
      std::vector<Piece> table(2 * size_t(ranks_.shape().ranks));
      const Job job = sides[r]->job(algorithm, timeout_ns, 0, table.data());
      const Status may = kernel::check_launch(ranks_.channel(r), {&job, 1}, table);
      if (!may.ok()) return may.what();
      held.push_back(on_device(sizeof(Job) + table.size() * sizeof(Piece)));
      std::byte* const at = held.back()->data();
      copy_over(at, &job, sizeof job);
      copy_over(at + sizeof job, table.data(), table.size() * sizeof(Piece));
      ranks.push_back({ranks_.channel(r).prepared(), reinterpret_cast<const Job*>(at), 1,
                       reinterpret_cast<const Piece*>(at + sizeof job)});
    }
    held.push_back(on_device(ranks.size() * sizeof(FusedRank)));
    copy_over(held.back()->data(), ranks.data(), ranks.size() * sizeof(FusedRank));
    const auto* at = reinterpret_cast<const FusedRank*>(held.back()->data());
    const Status status = gpu::launch_fused(at, present, ranks_.shape().blocks, nullptr);
    if (!status.ok()) return status.what();
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return cudaGetErrorString(error);
    for (uint32_t r = 0; r < present; ++r) {
      if (control(r).verdict.state != 0) return "rank " + std::to_string(r) + " has a verdict";
      const std::string wrong = sides[r]->verdict();
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

 private:
  DeviceRanks ranks_;
};

TEST_F(Device, EveryAlgorithmTypeAndOperatorFused) {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u}) {
    Fused fused({ranks, 2, 4096, 4096}, uint32_t(-40));
    uint64_t round = 0;
    for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
      for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
        if (!kernel::level().reduce(DType(t), ReduceOp(o))) continue;
        for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot,
                                                DeviceAlgorithm::kReduceChunks}) {
          Spec spec{.collective = Collective::kAllReduce, .dtype = DType(t), .op = ReduceOp(o), .counts = {}};
          spec.round = ++round;
          spec.counts.assign(ranks, algorithm == DeviceAlgorithm::kReduceChunks ? 5003 : 771);
          spec.shift = round % 3 == 0 ? 16 : 0;
          ASSERT_EQ(fused.run(algorithm, spec, ranks, kDeviceTimeout), "") << kernel::name(algorithm);
        }
      }
    }
  }
}

TEST_F(Device, EveryExchangeFused) {
  Fused fused({4, 3, 4096, 4096}, 0);
  uint64_t round = 0;
  for (const Collective collective : {Collective::kAllGather, Collective::kBroadcast, Collective::kAllToAll,
                                      Collective::kGather, Collective::kScatter, Collective::kBarrier}) {
    for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks}) {
      for (const size_t n : {size_t(1), size_t(37), size_t(5000)}) {
        Spec spec{.collective = collective, .counts = {n, n, n, n}, .round = ++round};
        if (collective == Collective::kBroadcast || collective >= Collective::kGather) spec.root = int(round % 4);
        if (collective == Collective::kBarrier) spec.root = -1, spec.counts = {0, 0, 0, 0};
        spec.shift = round % 2 * 4;
        ASSERT_EQ(fused.run(algorithm, spec, 4, kDeviceTimeout), "")
            << kernel::name(algorithm) << " " << describe(spec);
      }
    }
  }
}

/// A rank that never comes: the kernel ends, its verdict names the rank, and the context stays usable.
TEST_F(Device, AnAbsentRankEndsInAVerdict) {
  Fused fused({3, 2, 256, 4096}, 0);
  const Spec spec{.collective = Collective::kAllReduce, .counts = {100, 100, 100}};
  EXPECT_EQ(fused.run(DeviceAlgorithm::kReducePackets, spec, 2, 200'000'000), "rank 0 has a verdict");
  EXPECT_EQ(fused.control(0).verdict.peer, 2);
  EXPECT_EQ(fused.control(0).verdict.how, Waited::kTimedOut);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Device, KernelsReportTheirResources) {
  for (const kernel::KernelAttributes& f : attributes_) {
    std::printf("%-10s %3d registers, %5zu bytes local, %4d blocks at once\n", f.name, f.registers, f.local_bytes,
                f.resident);
    EXPECT_GE(f.resident, 1);
  }
}

}  // namespace
}  // namespace nvx::test
