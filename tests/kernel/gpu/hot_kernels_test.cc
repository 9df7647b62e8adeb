// The hot kernels beside the general ones: the same bits, and the same protocol, so that a rank may run the one and its
// peers the other.

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <thread>

#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

constexpr std::pair<DeviceAlgorithm, Collective> kHotWays[] = {
    {DeviceAlgorithm::kReducePackets, Collective::kAllReduce},
    {DeviceAlgorithm::kReducePackets, Collective::kReduceScatter},
    {DeviceAlgorithm::kReducePacketsTwoShot, Collective::kAllReduce},
    {DeviceAlgorithm::kReduceChunks, Collective::kAllReduce},
    {DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter},
    {DeviceAlgorithm::kExchangePackets, Collective::kAllGather},
    {DeviceAlgorithm::kExchangePackets, Collective::kAllToAll},
    {DeviceAlgorithm::kExchangeChunks, Collective::kAllGather},
    {DeviceAlgorithm::kExchangeChunks, Collective::kAllToAll},
    {DeviceAlgorithm::kExchangePieces, Collective::kAllToAll},
};

/// Which ranks run general kernels.
using Generals = bool (*)(int rank);

/// The results of the specs by rank, one kernel each. The outputs themselves are checked against the reference.
std::vector<std::vector<Bytes>> results_of(const std::vector<std::pair<DeviceAlgorithm, Spec>>& specs, int ranks,
                                           Generals generals, bool pooled) {
  Pools pools(ranks, 4);
  if (pooled) pools.map_all(4);
  SimulatedDevices devices({{uint32_t(ranks), 2, 128, 256},
                            3,
                            uint32_t(-20),
                            Stamp(0) - 9,
                            [](int, int) { return false; },
                            [&](int rank) { return pools.views(rank); }});
  std::vector<std::vector<Bytes>> results(static_cast<size_t>(ranks));
  as_threads(ranks, [&](int rank) {
    devices.fault(rank) = {InjectedFault::Kind::kNone, 40u << rank % 4, uint64_t(rank)};
    for (const auto& [algorithm, spec] : specs) {
      Batch batch(devices, rank, &pools);
      batch.add(algorithm, spec, kTimeout, {pooled, pooled});
      ASSERT_TRUE(batch.is_hot()) << describe(spec);
      ASSERT_EQ(batch.run<kernel::PushRules>(generals(rank) ? KernelChoice::kGeneral : KernelChoice::kAsLaunched), "");
      results[size_t(rank)].push_back(batch.result(0));
    }
  });
  EXPECT_TRUE(devices.guards_are_whole()) << "a kernel wrote outside its memory";
  return results;
}

class HotKernels : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HotKernels, testing::Values(1, 2, 3, 5, 9));

TEST_P(HotKernels, HaveTheBitsOfTheGeneralOnesAndWorkWithThem) {
  const int ranks = GetParam();
  std::vector<std::pair<DeviceAlgorithm, Spec>> specs;
  uint64_t round = 0;
  for (const auto& [algorithm, collective] : kHotWays) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const size_t n : {1, 23, 700}) {
        if (ranks > 5 && n == 23) continue;  // as many threads as ranks share the cores
        Spec spec = spec_of(collective, kernel::has_chunks(algorithm) ? n : n % 64, ranks, ++round);
        spec.dtype = dtype, spec.op = round % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
        spec.nature = Nature::kNearOne;  // the sign of a NaN depends on the order in which a processor adds
        spec.shift = round % 4 * size_of(dtype), spec.in_place = round % 5 == 0;
        specs.emplace_back(algorithm, spec);
      }
    }
  }
  for (const bool pooled : {false, true}) {
    const auto hot = results_of(
        specs, ranks, [](int) { return false; }, pooled);
    EXPECT_EQ(hot, results_of(
                       specs, ranks, [](int) { return true; }, pooled));
    EXPECT_EQ(hot, results_of(
                       specs, ranks, [](int rank) { return rank % 2 == 0; }, pooled));
  }
}

struct LaneCount {
  int count;
  int lanes() const { return count; }
};

/// A gather needs a pack or two for each lane, and shared memory behind the peers.
TEST(HotKernel, GathersAsManyPacksAsItsLanesAndMemoryHold) {
  EXPECT_TRUE(kernel::can_gather(LaneCount{512}, kernel::PacksInPackets(2, 512)));
  EXPECT_FALSE(kernel::can_gather(LaneCount{512}, kernel::PacksInPackets(2, 513)));
  EXPECT_FALSE(kernel::can_gather(LaneCount{256}, kernel::PacksInPackets(2, 512)));
  EXPECT_TRUE(kernel::can_gather(LaneCount{512}, kernel::PacksInPackets(kernel::kGatheringRanks, 16)));
  EXPECT_FALSE(kernel::can_gather(LaneCount{512}, kernel::PacksInPackets(kernel::kGatheringRanks + 1, 1)));
}

/// All packs of a call may have come with one arrival that differs, or without it: the result stays as it was.
TEST(HotKernel, AGatherLeavesTheResultAloneUntilAllArrivalsAreRight) {
  constexpr int kRanks = 3, kOther = 2;
  ASSERT_TRUE(kernel::can_gather(LaneCount{8}, kernel::PacksInPackets(kRanks, 3)));
  for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot}) {
    for (const bool comes : {true, false}) {
      SimulatedDevices devices({{kRanks, 1, 128, 256}, 8, 0, 0});
      as_threads(kRanks, [&, algorithm = algorithm, comes = comes](int rank) {
        if (rank == kOther && !comes) return;
        Spec spec = spec_of(Collective::kAllReduce, 12, kRanks, 0);
        spec.dtype = DType::kF32, spec.op = rank == kOther ? ReduceOp::kMax : ReduceOp::kSum;
        Batch batch(devices, rank);
        batch.add(algorithm, spec, comes ? kTimeout : 100 * kMillisecond);
        EXPECT_EQ(batch.is_hot(), rank != kOther);
        const Bytes before = batch.result(0);
        EXPECT_NE(batch.run(), "");
        if (rank == kOther) return;
        const kernel::DeviceVerdict& v = devices.control(rank).verdict;
        EXPECT_EQ(v.cause, comes ? kernel::Verdict::Cause::kMismatch : kernel::Verdict::Cause::kWait);
        EXPECT_EQ(v.peer, kOther);
        EXPECT_EQ(batch.result(0), before);
      });
    }
  }
}

/// Everything else is run by general kernels.
TEST(HotKernel, IsChosenByAlgorithmTypeAndOperator) {
  SimulatedDevices devices({{2, 1, 128, 256}, 1, 0, 0});
  const auto is_hot = [&](DeviceAlgorithm algorithm, Spec spec) {
    Batch batch(devices, 0);
    batch.add(algorithm, spec);
    return batch.is_hot();
  };
  Spec sum = spec_of(Collective::kAllReduce, 8, 2, 0);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    sum.dtype = dtype;
    EXPECT_TRUE(is_hot(DeviceAlgorithm::kReducePackets, sum));
  }
  sum.op = ReduceOp::kMax;
  EXPECT_FALSE(is_hot(DeviceAlgorithm::kReducePackets, sum));
  sum.op = ReduceOp::kSum, sum.dtype = DType::kI32;
  EXPECT_FALSE(is_hot(DeviceAlgorithm::kReduceChunks, sum));
  sum.dtype = DType::kF32, sum.shift = 1;
  EXPECT_FALSE(is_hot(DeviceAlgorithm::kReducePackets, sum)) << "its elements are not at addresses of their type";
  EXPECT_FALSE(is_hot(DeviceAlgorithm::kReducePackets, spec_of(Collective::kReduce, 8, 2, 0)));
  EXPECT_FALSE(is_hot(DeviceAlgorithm::kExchangePackets, spec_of(Collective::kBroadcast, 8, 2, 0)));
  EXPECT_TRUE(is_hot(DeviceAlgorithm::kExchangePackets, spec_of(Collective::kAllGather, 8, 2, 0)));
}

/// The pieces of a list may be views of different tensors: each has an alignment of its own.
TEST(HotKernel, NeedsAllPiecesOfAListAtAddressesOfTheirType) {
  for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReduceChunks}) {
    for (const int odd : {0, 1, 2}) {
      SimulatedDevices devices({{3, 1, 128, 256}, 1, 0, 0});
      Batch batch(devices, 0);
      batch.add(algorithm, {.collective = Collective::kReduceScatter, .counts = {8, 8, 12}});
      EXPECT_TRUE(batch.is_hot());
      batch.piece(odd).data += 1;
      EXPECT_FALSE(batch.is_hot()) << "piece " << odd;
      batch.piece(odd).bytes = 0;
      EXPECT_TRUE(batch.is_hot()) << "an empty piece is not accessed";
    }
  }
}

/// Which lanes of a block send the slices of a two-shot: all of them, one pack each, though a slice has fewer packs
/// than there are lanes.
TEST(HotKernel, SpreadsTheSlicesOfATwoShotOverPeersAndPacks) {
  constexpr int kRanks = 4, kLanes = 8, kSlicePacks = kLanes / kRanks;
  const kernel::DevicePad pad{{kRanks, 1, 128, 256}};
  const size_t first_step = pad.cell(kernel::Part::kPackets) / 2;
  for (const KernelChoice choice : {KernelChoice::kAsLaunched, KernelChoice::kGeneral}) {
    SimulatedDevices devices({pad.shape, kLanes, 100, 0});  // no epoch in which packets are restamped
    std::mutex mutex;
    std::map<std::thread::id, int> stores[kRanks];  // of the first step
    as_threads(kRanks, [&](int rank) {
      devices.fault(rank).effect = [&, rank](InjectedFault::Store, const void* to) {
        for (int peer = 0; peer < kRanks; ++peer) {
          for (const kernel::Part part : {kernel::Part::kPackets, kernel::Part::kPacketsOdd}) {
            const auto* const cell = &devices.pad(peer)[pad.offset(part, 0, uint32_t(rank))];
            const std::lock_guard lock(mutex);
            if (to >= cell && to < cell + first_step) ++stores[rank][std::this_thread::get_id()];
          }
        }
        return InjectedFault::Effect::kStored;
      };
      Batch batch(devices, rank);
      batch.add(DeviceAlgorithm::kReducePacketsTwoShot,
                {.collective = Collective::kAllReduce, .counts = {kRanks * kSlicePacks * 4}});
      ASSERT_TRUE(batch.is_hot());
      ASSERT_EQ(batch.run(choice), "");
    });
    for (const auto& of_rank : stores) {
      EXPECT_EQ(of_rank.size(), size_t(kLanes));
      for (const auto& [lane, count] : of_rank) EXPECT_EQ(count, 2) << "a pack is two packets";
    }
  }
}

/// Lanes keep all of their loads in flight: of few ranks they load several packs each.
TEST(HotKernel, LoadsSeveralPacksOfFewRanks) {
  constexpr uint32_t kEach[] = {8, 8, 4, 2, 2, 1, 1, 1, 1, 1};
  for (uint32_t ranks = 1; ranks < std::size(kEach); ++ranks)
    EXPECT_EQ(1u << kernel::packs_each<8>(ranks), kEach[ranks]) << ranks;
}

/// The lanes of a warp write one pack each: each of their two stores fills whole sectors.
TEST(PacketRows, FillWholeSectors) {
  for (size_t pack = 0; pack < 256; ++pack) {
    const size_t at = kernel::first_packet(pack);
    if (pack % kernel::kRowPacks != 0) {
      EXPECT_EQ(at, kernel::first_packet(pack - 1) + 1);
    }
    EXPECT_LT(at + kernel::kRowPacks,
              kernel::first_packet(pack / kernel::kRowPacks * kernel::kRowPacks) + kernel::kRowPackets);
  }
}

TEST(Divisor, DividesExactly) {
  for (const uint32_t n : {1u, 2u, 3u, 7u, 8u, 31u, 255u, 256u}) {
    const kernel::Divisor by(n);
    for (const uint64_t dividend : {uint64_t(0), uint64_t(1), uint64_t(n) - 1, uint64_t(n), uint64_t(n) * 12345 - 1,
                                    (uint64_t(1) << 54) - 1, (uint64_t(1) << 53) / n * n, (uint64_t(1) << 40) + n})
      EXPECT_EQ(by.quotient(dividend), dividend / n) << dividend << " / " << n;
  }
}

}  // namespace
}  // namespace nvx::test
