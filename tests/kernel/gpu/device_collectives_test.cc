// The device algorithms on host threads: every algorithm, collective, number of ranks, count, type and operator is
// compared bit for bit with a reference, at epochs and counters that wrap, at any alignment, and with delays.

#include "kernel/gpu/device_collectives.h"

#include <gtest/gtest.h>

#include <span>

#include "kernel/gpu/launch_cuda.h"
#include "support/epochs.h"
#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

using Plan = std::vector<std::pair<DeviceAlgorithm, Spec>>;

/// All ranks run the specs, `at_once` of them per kernel, without synchronisation in between.
template <class Rules = kernel::PushRules>
void perform_all(SimulatedDevices& devices, const Plan& plan, size_t at_once) {
  as_threads(devices.ranks(), [&](int rank) {
    for (size_t i = 0; i < plan.size(); i += at_once) {
      Batch batch(devices, rank);
      for (size_t j = i; j < std::min(i + at_once, plan.size()); ++j) batch.add(plan[j].first, plan[j].second);
      ASSERT_EQ(batch.run<Rules>(), "");
    }
  });
  EXPECT_TRUE(devices.guards_are_whole()) << "a kernel wrote outside its memory";
}

/// Whether every rank can run it with packets.
bool fits(SimulatedDevices& devices, DeviceAlgorithm algorithm, const Spec& spec) {
  for (int rank = 0; rank < devices.ranks(); ++rank) {
    Batch batch(devices, rank);
    batch.add(algorithm, spec);
    if (!batch.fits()) return false;
  }
  return true;
}

class Pushes : public testing::TestWithParam<std::tuple<int, uint32_t>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  SimulatedDevices::Shape shape(uint32_t blocks, int lanes) const {
    const uint32_t first = std::get<1>(GetParam());
    // Chunk counters wrap with the epochs, at 2^32 and at 2^64.
    const Stamp chunk = first == 0 ? 0 : first > (1u << 31) ? Stamp(0) - 5 : (Stamp(1) << 32) - 5;
    return {{uint32_t(ranks()), blocks, 128, 256}, lanes, first, chunk};
  }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Pushes,
                         testing::Combine(testing::Values(1, 2, 3, 4, 7, 8), testing::ValuesIn(first_epochs())),
                         [](const auto& info) { return name_of(std::get<0>(info.param), std::get<1>(info.param)); });

TEST_P(Pushes, EveryCollectiveAtEveryCount) {
  SimulatedDevices devices(shape(2, 2));
  Plan plan;
  uint64_t round = 0;
  for (const size_t n : {0, 1, 3, 17, 45, 131, 2049}) {
    for (const auto& [algorithm, collective] : kWays) {
      Spec spec = spec_of(collective, n, ranks(), ++round);
      spec.shift = round % 5 == 4 ? 8 : round % 5;
      spec.in_place = round % 3 == 0;
      if (fits(devices, algorithm, spec)) plan.emplace_back(algorithm, spec);
    }
  }
  EXPECT_GT(plan.size(), 90u);
  perform_all(devices, plan, 4);
}

TEST_P(Pushes, EveryTypeAndOperator) {
  SimulatedDevices devices(shape(1, 3));
  Plan plan;
  uint64_t round = 0;
  for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
    for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
      if (!kernel::level().reduce(DType(t), ReduceOp(o))) continue;
      for (const DeviceAlgorithm algorithm :
           {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot, DeviceAlgorithm::kReduceChunks}) {
        const size_t element = size_of(DType(t)), shifts[] = {0, element, 3 * element, 16};
        ++round;
        Spec spec = spec_of(Collective::kAllReduce, round % 5 == 4 ? 1 : 61, ranks(), round);
        spec.dtype = DType(t), spec.op = ReduceOp(o), spec.shift = shifts[round % 4];
        if (!fits(devices, algorithm, spec)) spec.counts.assign(spec.counts.size(), 23);
        ASSERT_TRUE(fits(devices, algorithm, spec)) << describe(spec);
        plan.emplace_back(algorithm, spec);
      }
    }
  }
  perform_all(devices, plan, 16);
}

/// Each type and operator with each reduce algorithm, at each odd count and offset; with numbers near one, or with any
/// bits.
TEST(DeviceAlgorithm, EveryTypeOperatorCountAndOffset) {
  constexpr int kRanks = 3;
  SimulatedDevices devices({{kRanks, 1, 128, 256}, 3, uint32_t(-7), 0});
  Plan plan;
  uint64_t round = 0;
  const size_t step = as_fast(1, 11);
  for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
    for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
      if (!kernel::level().reduce(DType(t), ReduceOp(o))) continue;
      for (const auto& [algorithm, collective] : std::span(kWays).first(kReducingCases)) {
        for (const size_t n : {1, 5, 23, 61}) {
          for (const size_t shift : {0, 1, 3, 7}) {
            if (++round % step != 0) continue;
            Spec spec = spec_of(collective, n, kRanks, round);
            spec.dtype = DType(t), spec.op = ReduceOp(o), spec.shift = shift * size_of(DType(t));
            spec.nature = round / kRanks % 3 == 0 ? Nature::kNearOne : Nature::kWild;
            spec.in_place = round % 5 == 0;
            ASSERT_TRUE(fits(devices, algorithm, spec)) << describe(spec);
            plan.emplace_back(algorithm, spec);
          }
        }
      }
    }
  }
  EXPECT_GT(plan.size() * step, 14'000u);
  perform_all(devices, plan, 16);
}

/// Pairs that cannot access each other's devices use other memory, each pair its own. Everything else is the same.
TEST(DeviceAlgorithm, PairsMayUseMemoryOfTheirOwn) {
  for (const int ranks : {2, 3, 5}) {
    SimulatedDevices devices(
        {{uint32_t(ranks), 2, 128, 256}, 2, uint32_t(-9), 0, [](int a, int b) { return (a + b) % 2 == 1; }});
    Plan plan;
    uint64_t round = 0;
    for (const size_t n : {2, 45, 2049}) {
      for (const auto& [algorithm, collective] : kWays) {
        Spec spec = spec_of(collective, n, ranks, ++round);
        if (round % 2 == 0) spec.op = ReduceOp::kPremulSum;  // the factors are in the arrivals
        if (fits(devices, algorithm, spec)) plan.emplace_back(algorithm, spec);
      }
    }
    perform_all(devices, plan, 4);
    EXPECT_TRUE(devices.pairs_are_apart());
  }
}

/// Delays before every operation make ranks arrive in every order.
TEST(DeviceAlgorithm, OrderOfArrivalDoesNotMatter) {
  for (const int ranks : {2, 3, 4}) {
    SimulatedDevices devices({{uint32_t(ranks), 1, 128, 256}, 2, uint32_t(-30), Stamp(0) - 30});
    for (int r = 0; r < ranks; ++r) devices.fault(r) = {InjectedFault::Kind::kNone, 100u << r, uint64_t(r)};
    Plan plan;
    for (uint64_t round = 0; round < as_fast(120, 40); ++round) {
      const auto& [algorithm, collective] = kWays[round * 7 % std::size(kWays)];
      const Spec spec = spec_of(collective, round % 4 == 0 ? 200 : 33, ranks, round);
      if (fits(devices, algorithm, spec)) plan.emplace_back(algorithm, spec);
    }
    perform_all(devices, plan, 3);
  }
}

/// The chunks that all blocks of a rank have sent to another one.
Stamp chunks_sent(SimulatedDevices& devices, int from, int to) {
  Stamp sum = 0;
  for (uint32_t b = 0; b < devices.shape().blocks; ++b) {
    const std::byte* at = devices.channel(from).state + kernel::DeviceState{devices.shape()}.pipe(b, uint32_t(to));
    sum += reinterpret_cast<const kernel::PipeState*>(at)->sent;
  }
  return sum;
}

/// In one operation, some pairs use packets and some chunks, exactly by the capacity of packets.
TEST(DeviceAlgorithm, PairsGoByWhatTheirPieceIs) {
  constexpr int kRanks = 3;
  constexpr size_t kHeld = 2 * 32 * sizeof(kernel::Pack);  // in two blocks of 64 packets
  for (const Collective collective : {Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    for (const size_t most : {kHeld - 1, kHeld, kHeld + 1}) {
      SimulatedDevices devices({{kRanks, 2, 64, 256}, 2, 0, 0});
      Spec spec{.collective = collective, .dtype = DType::kU8, .counts = {most, 5, most}, .round = 4};
      if (is_rooted(collective)) spec.root = 1;
      perform_all(devices, {{DeviceAlgorithm::kExchangePieces, spec}}, 1);
      for (int r = 0; r < kRanks; ++r) {
        const Side side(spec, r, kRanks);
        for (int p = 0; p < kRanks; ++p) {
          if (p == r) continue;
          EXPECT_EQ(chunks_sent(devices, r, p) > 0, side.send()[size_t(p)].bytes > kHeld) << describe(spec) << r << p;
        }
      }
    }
  }
}

/// The host learns the epoch that all blocks have ended, even if some blocks are far ahead.
TEST(DeviceAlgorithm, TheHostLearnsWhatHasEnded) {
  const Plan plan = {{DeviceAlgorithm::kExchangePackets, spec_of(Collective::kBarrier, 0, 2, 0)},
                     {DeviceAlgorithm::kReduceChunks, spec_of(Collective::kAllReduce, 700, 2, 1)},
                     {DeviceAlgorithm::kReducePackets, spec_of(Collective::kAllReduce, 40, 2, 2)}};
  for (const size_t at_once : {size_t(1), size_t(3)}) {
    SimulatedDevices devices({{2, 3, 64, 256}, 2, 41, 0});
    devices.fault(1) = {InjectedFault::Kind::kNone, 300, 7};
    perform_all(devices, plan, at_once);
    for (int r = 0; r < 2; ++r) {
      EXPECT_EQ(kernel::least_ended(devices.control(r), 3).epoch, 44u);
      EXPECT_EQ(devices.state(r).left, 0u);
    }
  }
}

/// Packets have a capacity, operators a set of types, and algorithms a set of collectives.
TEST(Launch, UnsupportedOperationIsRefused) {
  SimulatedDevices devices({{2, 1, 64, 256}, 1, 0, 0});  // 32 packs from each rank
  const auto sum = [](size_t n) { return Spec{.collective = Collective::kAllReduce, .counts = {n, n}}; };
  EXPECT_TRUE(fits(devices, DeviceAlgorithm::kReducePackets, sum(128)));
  EXPECT_FALSE(fits(devices, DeviceAlgorithm::kReducePackets, sum(129)));
  EXPECT_TRUE(fits(devices, DeviceAlgorithm::kReducePacketsTwoShot, sum(128)));
  EXPECT_FALSE(fits(devices, DeviceAlgorithm::kReducePacketsTwoShot, sum(129)));
  EXPECT_TRUE(fits(devices, DeviceAlgorithm::kReduceChunks, sum(100'000)));
  EXPECT_FALSE(fits(devices, DeviceAlgorithm::kExchangeChunks, sum(1)));
  EXPECT_FALSE(fits(devices, DeviceAlgorithm::kReduceChunks, spec_of(Collective::kAllGather, 1, 2, 0)));
  kernel::CollectiveArgs args;
  args.call.fingerprint = {Collective::kAllReduce, DType::kF32, ReduceOp::kBxor, {}, -1, 1, 0, 0};
  const Job job = kernel::job_of(DeviceAlgorithm::kReduceChunks, args, 0, 1, 4, 0, nullptr);
  EXPECT_FALSE(kernel::can_do(DeviceAlgorithm::kReduceChunks, job, {1, 1, 64, 256}, nullptr));
}

TEST(Launch, ReportsWhyItCannot) {
  std::vector<kernel::KernelAttributes> attributes;
  const Status status = kernel::load_cuda(&attributes);
  if (status.ok()) GTEST_SKIP() << "there is a device here";
  EXPECT_EQ(status.what().rfind("nvx: ", 0), 0u) << status.what();
}

}  // namespace
}  // namespace nvx::test
