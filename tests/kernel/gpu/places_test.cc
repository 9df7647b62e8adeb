// Direct access of the device algorithms between ranks that have mapped each other's pools: the same results bit for
// bit for every mixture of ranks, and negative controls of the rules.

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "support/epochs.h"
#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::Part;
using kernel::Reach;

constexpr size_t kChunkBytes = 256;

struct Step {
  DeviceAlgorithm algorithm;
  Spec spec;
};
/// Which tensors of a rank are in its pool in the i-th step.
using Where = std::function<Placed(size_t i, int rank)>;

Placed nowhere(size_t, int) { return {}; }
Placed everywhere(size_t, int) { return {true, true}; }
/// Any mixture, by ranks and steps.
Placed mixed(size_t i, int rank) {
  const uint64_t bits = Hash().add(i).add(uint64_t(rank)).value() >> 20;
  return {bits % 2 == 0, bits / 2 % 2 == 0};
}

/// Ranks with pools, of which each has mapped a given part of the others.
struct World {
  explicit World(int ranks, uint32_t blocks = 2, uint32_t first_epoch = 0, size_t first_byte = 0)
      : pools(ranks, 4, first_byte),
        devices({{uint32_t(ranks), blocks, 128, kChunkBytes},
                 2,
                 first_epoch,
                 Stamp(0) - 5,
                 [](int, int) { return false; },
                 [this](int rank) { return pools.views(rank); }}) {}

  /// All ranks run the steps, `at_once` of them per kernel.
  template <class Rules = kernel::PushRules>
  int wrong(const std::vector<Step>& steps, const Where& where, size_t at_once = 1, uint64_t timeout_ns = kTimeout) {
    std::atomic<int> wrong{0};
    as_threads(devices.ranks(), [&](int rank) {
      for (size_t i = 0; i < steps.size(); i += at_once) {
        Batch batch(devices, rank, &pools);
        for (size_t j = i; j < std::min(i + at_once, steps.size()); ++j)
          batch.add(steps[j].algorithm, steps[j].spec, timeout_ns, where(j, rank));
        const std::string text = batch.run<Rules>();
        if (!text.empty() && timeout_ns == kTimeout) ADD_FAILURE() << text;
        if (!text.empty()) ++wrong;
      }
    });
    EXPECT_TRUE(devices.guards_are_whole()) << "a kernel wrote outside its memory";
    return wrong;
  }
  /// Whether the only data in the slots is a rank's own.
  bool slots_are_fresh() {
    const kernel::DevicePad pad{devices.shape()};
    for (int r = 0; r < devices.ranks(); ++r) {
      for (uint32_t b = 0; b < devices.shape().blocks; ++b) {
        for (int sender = 0; sender < devices.ranks(); ++sender) {
          const auto cell =
              devices.pad(r).subspan(pad.offset(Part::kStaging, b, uint32_t(sender)), pad.cell(Part::kStaging));
          const bool fresh = std::all_of(cell.begin(), cell.end(), [](std::byte x) { return x == std::byte(0); });
          if (sender != r && !fresh) return false;
        }
      }
    }
    return true;
  }
  uint32_t direct(int rank) { return devices.control(rank).direct; }

  Pools pools;
  SimulatedDevices devices;
};

/// Every algorithm and length, from packets to chunks.
std::vector<Step> all_ways(int ranks, std::initializer_list<size_t> lengths) {
  std::vector<Step> steps;
  uint64_t round = 0;
  for (const size_t n : lengths) {
    for (const auto& [algorithm, collective] : kWays) {
      ++round;
      const bool in_packets = !kernel::has_chunks(algorithm);
      Spec spec = spec_of(collective, in_packets ? n % 24 : n, ranks, round);
      spec.shift = round % 5 == 4 ? 8 : round % 3 == 0 ? 0 : round % 5;
      spec.in_place = round % 2 == 0;
      if (round % 4 == 1) spec.op = ReduceOp::kPremulSum;
      steps.push_back({algorithm, spec});
    }
  }
  return steps;
}

class Places : public testing::TestWithParam<std::tuple<int, uint32_t>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Places,
                         testing::Combine(testing::Values(1, 2, 3, 8), testing::ValuesIn(first_epochs())),
                         [](const auto& info) { return name_of(std::get<0>(info.param), std::get<1>(info.param)); });

TEST_P(Places, EveryCollectiveWhereverTensorsLie) {
  const auto [ranks, first_epoch] = GetParam();
  World world(ranks, 2, first_epoch);
  world.pools.map_all(4);
  const auto steps = all_ways(ranks, {1, 17, 300, 2049});
  for (const Where& where : {Where(nowhere), Where(mixed), Where(everywhere)}) world.wrong(steps, where, 4);
  for (int r = 0; r < ranks && ranks > 1; ++r) EXPECT_GT(world.direct(r), 0u);
}

/// Pools that end within tensors, and pairs of which both, one or none have mapped the other.
TEST_P(Places, MappingMayEndInsideATensor) {
  const auto [ranks, first_epoch] = GetParam();
  World world(ranks, 3, first_epoch, 2 * Reach::kGranule - 9000);
  for (int i = 0; i < ranks * ranks; ++i) world.pools.map(i / ranks, i % ranks, size_t(i * 7 % 5));
  world.wrong(all_ways(ranks, {5, 700, 2049}), everywhere, 2);
}

/// None of these uses the slots.
TEST(Place, NothingIsStagedWhereAllSeeEverything) {
  const std::pair<DeviceAlgorithm, Collective> ways[] = {{DeviceAlgorithm::kReduceChunks, Collective::kAllReduce},
                                                         {DeviceAlgorithm::kReduceChunks, Collective::kReduce},
                                                         {DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter},
                                                         {DeviceAlgorithm::kExchangeChunks, Collective::kAllGather},
                                                         {DeviceAlgorithm::kExchangeChunks, Collective::kAllToAll},
                                                         {DeviceAlgorithm::kExchangePieces, Collective::kAllToAll},
                                                         {DeviceAlgorithm::kExchangeChunks, Collective::kBroadcast},
                                                         {DeviceAlgorithm::kExchangeChunks, Collective::kGather},
                                                         {DeviceAlgorithm::kExchangeChunks, Collective::kScatter}};
  for (const auto& [algorithm, collective] : ways) {
    for (const bool in_place : {false, true}) {
      if (in_place && collective == Collective::kAllToAll) continue;  // the next test's
      World world(3);
      world.pools.map_all(4);
      Spec spec = spec_of(collective, 3072, 3, 4);
      spec.in_place = in_place;
      world.wrong({{algorithm, spec}}, everywhere);
      EXPECT_TRUE(world.slots_are_fresh()) << describe(spec);
      world.wrong({{algorithm, spec}}, nowhere);
      EXPECT_FALSE(world.slots_are_fresh()) << describe(spec);
    }
  }
}

/// Otherwise a peer would write to memory that this rank has not read yet.
TEST(Place, AnAllToAllInPlaceIsStaged) {
  for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kExchangeChunks, DeviceAlgorithm::kExchangePieces}) {
    World world(3);
    world.pools.map_all(4);
    Spec spec = spec_of(Collective::kAllToAll, 3072, 3, 4);
    spec.counts = {3072};
    spec.in_place = true;
    world.wrong({{algorithm, spec}}, everywhere);
    EXPECT_FALSE(world.slots_are_fresh());
  }
}

/// Inputs only, and results only.
TEST(Place, ARankMayHaveOneTensorInItsPool) {
  const Spec spec = spec_of(Collective::kAllReduce, 3000, 2, 1);
  World world(2, 1);
  world.pools.map_all(4);
  const auto counted = [&](Placed placed) {
    const uint32_t before = world.direct(0);
    world.wrong({{DeviceAlgorithm::kReduceChunks, spec}},
                [&](size_t, int rank) { return rank == 0 ? placed : Placed{}; });
    return world.direct(0) - before;
  };
  EXPECT_EQ(counted({}), 0u);
  EXPECT_EQ(counted({.in = true, .out = false}), 1u);
  EXPECT_EQ(counted({.in = false, .out = true}), 1u);
  EXPECT_EQ(counted({.in = true, .out = true}), 2u);
}

/// A sender that has not met the receiver does not wait for it: pieces that fit the slots use them.
TEST(Place, ARootSendsWhatSlotsHoldWithoutWaiting) {
  for (const size_t chunks : {kernel::kChunks, kernel::kChunks + 1}) {
    World world(2, 1);
    world.pools.map_all(4);
    Spec spec{.collective = Collective::kBroadcast, .dtype = DType::kU8, .root = 0, .counts = {chunks * kChunkBytes}};
    spec.counts.push_back(spec.counts[0]);
    Batch batch(world.devices, 0, &world.pools);
    batch.add(DeviceAlgorithm::kExchangeChunks, spec, 100 * kMillisecond, {true, true});
    EXPECT_EQ(batch.run().empty(), chunks == kernel::kChunks);
    EXPECT_EQ(world.slots_are_fresh(), chunks > kernel::kChunks);
  }
}

/// The host maps more while kernels run.
TEST(Place, PoolsMayGrowWhileKernelsRun) {
  World world(3, 2, 0, Reach::kGranule - 3000);
  for (int r = 0; r < 3; ++r) world.devices.fault(r) = {InjectedFault::Kind::kNone, 100u << r, uint64_t(r)};
  std::vector<Step> steps;
  for (uint64_t i = 0; i < as_fast(60, 20); ++i) {
    const bool reduces = i % 3 == 0;
    steps.push_back({reduces ? DeviceAlgorithm::kReduceChunks : DeviceAlgorithm::kExchangeChunks,
                     spec_of(reduces ? Collective::kAllReduce : Collective::kAllGather, 500, 3, i)});
  }
  std::thread host([&] {
    for (size_t granules = 1; granules <= 4; ++granules) {
      for (int i = 0; i < 9; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        world.pools.map(i / 3, i % 3, granules);
      }
    }
  });
  world.wrong(steps, everywhere, 3);
  host.join();
  world.wrong({{DeviceAlgorithm::kReduceChunks, spec_of(Collective::kAllReduce, 500, 3, 1)}}, everywhere);
  EXPECT_GT(world.direct(0), 0u);
}

/// Delays before every operation, with some ranks in pools: after a kernel ends, its memory may be reused.
TEST(Place, OrderOfArrivalDoesNotMatter) {
  for (const int ranks : {2, 3, 4}) {
    World world(ranks, 1, uint32_t(-30));
    world.pools.map_all(4);
    for (int r = 0; r < ranks; ++r) world.devices.fault(r) = {InjectedFault::Kind::kNone, 100u << r, uint64_t(r)};
    std::vector<Step> steps = all_ways(ranks, {200, 33});
    for (const Where& where : {Where(mixed), Where(everywhere)}) world.wrong(steps, where);
  }
}

// ---- failures

TEST(Place, AnAbsentRankEndsWhatOthersDoInTime) {
  for (const auto& [algorithm, collective] : kWays) {
    if (!kernel::has_chunks(algorithm) || is_rooted(collective) || collective == Collective::kBarrier) continue;
    World world(3);
    world.pools.map_all(4);
    const DeviceAlgorithm way = algorithm;
    const Spec spec = spec_of(collective, 3000, 3, 0);
    as_threads(3, [&](int rank) {
      if (rank == 2) return;
      Batch batch(world.devices, rank, &world.pools);
      batch.add(way, spec, 50 * kMillisecond, {true, true});
      const auto began = Clock::now();
      EXPECT_NE(batch.run(), "");
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
    });
  }
}

#if !defined(__SANITIZE_THREAD__)
// The following cases are races, as with any failed operation whose peers continue. They need no sanitizer.

/// A rank that is aborted at any check ends, and so does the other one when it is aborted too. The first one's writes
/// to the other's result end at the next check: at most one chunk.
TEST(Place, AnAbortEndsWhatIsWrittenWithinAChunk) {
  constexpr size_t kWhole = 12 * kChunkBytes;
  bool ended_well = false;
  size_t cut_short = 0;
  for (uint32_t look = 1; !ended_well; ++look) {
    ASSERT_LT(look, 100u);
    World world(2, 1);
    world.pools.map_all(4);
    world.devices.fault(0).abort_at = look;
    const Spec spec{.collective = Collective::kBroadcast, .dtype = DType::kU8, .root = 0, .counts = {kWhole, kWhole}};
    as_threads(2, [&](int rank) {
      Batch batch(world.devices, rank, &world.pools);
      batch.add(DeviceAlgorithm::kExchangeChunks, spec, kTimeout, {true, true});
      const bool well = batch.run().empty();
      if (rank == 0) {
        ended_well = well;
        if (!well) std::atomic_ref(world.devices.control(1).abort).store(1);
        return;
      }
      size_t written = kWhole;
      while (written > 0 && batch.out()[written - 1] == std::byte(0xEE)) --written;
      // Waits check too: there may be more checks than chunks, but never fewer.
      EXPECT_LE(well ? 0 : written, look * kChunkBytes);
      if (!well && written > 0 && written < kWhole) ++cut_short;
    });
    EXPECT_TRUE(world.slots_are_fresh());
  }
  EXPECT_GT(cut_short, 0u);
}

/// Two ranks, of which rank 0 is aborted at one of its checks, and the part of its result that the other one still
/// writes.
template <class Rules>
struct Failing {
  Failing(DeviceAlgorithm algorithm, const Spec& spec, uint32_t look, uint64_t timeout_ns = 150 * kMillisecond) {
    World world(2, 1);
    world.pools.map_all(4);
    world.devices.fault(0).abort_at = look;
    world.devices.fault(1) = {InjectedFault::Kind::kNone, 100, look};
    std::vector<std::unique_ptr<Batch>> batches;
    for (int rank = 0; rank < 2; ++rank) {
      batches.push_back(std::make_unique<Batch>(world.devices, rank, &world.pools));
      batches.back()->add(algorithm, spec, rank == 0 ? kTimeout : timeout_ns, {true, true});
    }
    as_threads(2, [&](int rank) {
      const bool ended_well = batches[size_t(rank)]->run<Rules>().empty();
      if (rank == 1) return;
      well = ended_well;
      written = extent(*batches[0]);
    });
    if (!well) written_later = extent(*batches[0]) - written;
  }
  /// The end of the part of its result that has been written; at least the first half, which is the rank's own.
  static size_t extent(Batch& batch) {
    const size_t all = batch.out() ? batch.result(0).size() : 0;
    size_t n = all;
    while (n > all / 2 && std::atomic_ref(batch.out()[n - 1]).load() == std::byte(0xEE)) --n;
    return n;
  }

  bool well = false;
  size_t written = 0, written_later = 0;
};

struct Silent : kernel::PushRules {
  static constexpr bool kReportsFailure = false;
};

/// Whether a rank ends successfully with wrong data if it is held at one of its awaits until the other one has given up
/// and reused its tensors.
template <class Rules>
bool is_taken_in(Collective collective, uint32_t await, uint64_t timeout_ns) {
  World world(2, 1);
  world.pools.map_all(4);
  std::atomic<bool> over{false};
  world.devices.fault(1).holds = [&](uint32_t n) {
    if (n == await) (void)eventually(std::chrono::seconds(30), [&] { return over.load(); });
  };
  // Whole packs, as nothing else is read in place, and no more than the slots hold: the failing rank may have posted
  // all of it.
  const Spec spec = spec_of(collective, 128, 2, 1);
  bool taken_in = false;
  as_threads(2, [&](int rank) {
    Batch batch(world.devices, rank, &world.pools);
    // Rank 1's own input is staged; otherwise it would wait for its reader, which has failed.
    batch.add(DeviceAlgorithm::kReduceChunks, spec, rank == 0 ? timeout_ns : 3 * timeout_ns, {rank == 0, true});
    const std::string text = batch.run<Rules>();
    if (rank == 1) return void(taken_in = text.find("wrong output") != std::string::npos);
    if (!text.empty()) std::memset(batch.in(), 0x77, batch.in_bytes());  // the caller reuses the tensor
    over = true;
  });
  return taken_in;
}

/// The number of its awaits at which this happens.
template <class Rules>
int taken_in(uint64_t timeout_ns) {
  int times = 0;
  for (const Collective collective : {Collective::kReduceScatter, Collective::kAllReduce}) {
    for (uint32_t await = 1; await <= 18; ++await) times += is_taken_in<Rules>(collective, await, timeout_ns);
  }
  return times;
}

TEST(Place, AnInputWhoseOwnerHasFailedIsNotUsed) { EXPECT_EQ(taken_in<kernel::PushRules>(50 * kMillisecond), 0); }

/// Rank 1 fails while rank 0 is at one of its barriers: after all that its lanes have done before that barrier, and
/// before anything that they do after it. Reports the chunks that rank 0 has posted, and whether it has
/// written to rank 1's result.
struct Afterwards {
  Stamp posted;
  bool written;
  bool operator==(const Afterwards&) const = default;
};
Afterwards after_failure_at(uint32_t barrier) {
  World world(2, 1);
  world.pools.map_all(4);
  const kernel::DevicePad pad{world.devices.shape()};
  const auto counters = [&](int reader) {
    const std::byte* const at = world.devices.pad(reader).data() + pad.offset(Part::kCounters, 0, uint32_t(1 - reader));
    return reinterpret_cast<kernel::PeerCounters*>(const_cast<std::byte*>(at));
  };
  const Stamp first = counters(1)->posted;
  std::atomic<int> came{0};
  world.devices.fault(0).holds = [&](uint32_t n) {
    if (n != barrier || ++came != 2) return;  // the last lane to arrive
    std::atomic_ref(counters(0)->quit).store(uint64_t(1) << 32 | 1);
    for (int rank = 0; rank < 2; ++rank) std::atomic_ref(world.devices.control(rank).abort).store(1);  // ends the waits
  };
  bool written = false;
  as_threads(2, [&](int rank) {
    Batch batch(world.devices, rank, &world.pools);
    batch.add(DeviceAlgorithm::kReduceChunks, {.collective = Collective::kAllReduce, .counts = {128, 128}}, kTimeout,
              {true, true});
    EXPECT_NE(batch.run(), "");
    if (rank == 1) written = batch.out()[0] != std::byte(0xEE);
  });
  return {counters(1)->posted - first, written};
}

/// One chunk per slice. The barriers: one of enter(), three of meet(), then four per round: of await() when the peers
/// have arrived and when none has failed, and the same of publish(). Inputs are read in the second round.
TEST(Place, APeerIsCheckedWhenNoLaneAccessesItsTensors) {
  EXPECT_EQ(after_failure_at(9), (Afterwards{1, false})) << "a lane checked a peer while another one still waited";
  EXPECT_EQ(after_failure_at(10), (Afterwards{1, true}));
  EXPECT_EQ(after_failure_at(11), (Afterwards{1, true})) << "a lane checked a peer while another one still read";
  EXPECT_EQ(after_failure_at(12), (Afterwards{2, true})) << "its barriers have moved";
}

/// The most that was written to a result after its kernel had failed.
template <class Rules>
size_t written_too_late() {
  size_t most = 0;
  Spec spec{.collective = Collective::kAllGather, .dtype = DType::kU8, .counts = {40 * kChunkBytes, 40 * kChunkBytes}};
  for (uint32_t look = 3; look < 20; look += 2) {
    const Failing<Rules> failing(DeviceAlgorithm::kExchangeChunks, spec, look);
    EXPECT_FALSE(failing.well);
    most = std::max(most, failing.written_later);
  }
  return most;
}

TEST(Place, AResultIsWrittenNoLongerThanAChunkAfterAFailure) {
  // One chunk in progress, and one that a check just before had permitted.
  EXPECT_LE(written_too_late<kernel::PushRules>(), 2 * kChunkBytes);
}

// ---- epochs that wrap

struct Restamping : kernel::PushRules {
  static constexpr uint32_t kRestampEvery = 4;
};

/// A rank without places never signals that it is ready. Its last signal must not come to look new.
TEST(PlaceWrap, OldReadySignalIsStampedAnew) {
  World world(2, 1, uint32_t(-30));
  world.pools.map_all(4);
  const auto steps = all_ways(2, {300, 2049});
  for (const Where& where : {Where(mixed), Where(nowhere), Where(everywhere), Where(nowhere)})
    EXPECT_EQ(world.wrong<Restamping>(steps, where), 0);
  const kernel::DevicePad pad{world.devices.shape()};
  kernel::PeerCounters line;
  std::memcpy(&line, world.devices.pad(0).data() + pad.offset(Part::kCounters, 0, 1), sizeof line);
  const uint32_t epoch = uint32_t(-30) + uint32_t(4 * steps.size());
  EXPECT_LE(epoch - uint32_t(line.ready >> 32), Restamping::kRestampEvery + 1);
}

// ---- negative controls: with a rule broken, wrong results must appear

struct Unannounced : kernel::PushRules {
  static constexpr bool kAnnouncedFirst = false;
};
struct LocalReach : kernel::PushRules {
  static constexpr bool kReachIsAnnounced = false;
};
struct Endless : kernel::PushRules {
  static constexpr bool kReachEnds = false;
};
struct NoReaders : kernel::PushRules {
  static constexpr bool kReadersFirst = false;
};

std::vector<Step> many(DeviceAlgorithm algorithm, Collective collective, size_t n) {
  std::vector<Step> steps;
  for (uint64_t i = 0; i < 20; ++i) steps.push_back({algorithm, spec_of(collective, n, 2, i)});
  return steps;
}

/// A broken rule may need several tries to show. `first`: the places of tensors. `maps`: changes one rank's mapping,
/// before and during the run.
template <class Rules>
bool goes_wrong(const std::vector<Step>& steps, const Where& where, size_t first = 0, size_t mapped = 4,
                bool grows = false) {
  for (int tries = 0; tries < 20; ++tries) {
    World world(2, 1, 0, first);
    world.pools.map_all(mapped);
    world.devices.fault(1) = {InjectedFault::Kind::kNone, 400, uint64_t(tries)};
    std::thread host([&] {
      for (size_t more = mapped + 1; grows && more <= 4; ++more) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        world.pools.map_all(more);
      }
    });
    const int wrong = world.wrong<Rules>(steps, where, 1, 300 * kMillisecond);
    host.join();
    if (wrong > 0) return true;
  }
  return false;
}

TEST(PlaceControls, WithoutTheArrivalWritesHitUnreadyMemory) {
  const auto steps = many(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 300);
  EXPECT_TRUE(goes_wrong<Unannounced>(steps, mixed));
}

TEST(PlaceControls, WithoutAnAnnouncedReachPairsDisagree) {
  const auto steps = many(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 700);
  EXPECT_TRUE(goes_wrong<LocalReach>(steps, everywhere, 3 * Reach::kGranule - 6000, 1, /*grows=*/true));
}

TEST(PlaceControls, WithoutTheBoundDataBehindTheMappingIsLost) {
  const auto steps = many(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 700);
  EXPECT_TRUE(goes_wrong<Endless>(steps, everywhere, 2 * Reach::kGranule - 3000, 2));
}

TEST(PlaceControls, AnInputThatIsLeftTooEarlyIsReadTooLate) {
  const auto steps = many(DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter, 200);
  EXPECT_TRUE(goes_wrong<NoReaders>(steps, everywhere));
}

TEST(PlaceControls, WithoutAFailureNoticePeersAcceptWrongData) {
  int times = 0;
  for (const uint64_t timeout_ms : {50, 500, 5000}) times = times ? times : taken_in<Silent>(timeout_ms * kMillisecond);
  EXPECT_GT(times, 0);
}

TEST(PlaceControls, WithoutAFailureNoticePeersWriteForLong) { EXPECT_GT(written_too_late<Silent>(), 10 * kChunkBytes); }

TEST(PlaceControls, NoneOfThemGoesWrongByTheRules) {
  for (const auto& [algorithm, collective] : {std::pair(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather),
                                              std::pair(DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter)}) {
    World world(2, 1, 0, 2 * Reach::kGranule - 3000);
    world.pools.map_all(2);
    world.devices.fault(1) = {InjectedFault::Kind::kNone, 400, 1};
    EXPECT_EQ(world.wrong(many(algorithm, collective, 700), mixed), 0);
  }
}
#endif

}  // namespace
}  // namespace nvx::test
