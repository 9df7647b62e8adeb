// The device algorithms beside a rank that fails, and negative controls: the tests must fail if a rule of the channel
// is dropped.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::DeviceVerdict;
using kernel::Verdict;

SimulatedDevices::Shape small(int ranks, uint32_t first_epoch = 0, uint32_t blocks = 1) {
  return {{uint32_t(ranks), blocks, 128, 256}, 2, first_epoch, 0};
}

/// Runs one spec of one rank and returns its verdict; kNone: success.
DeviceVerdict run(SimulatedDevices& devices, int rank, DeviceAlgorithm algorithm, const Spec& spec,
                  uint64_t timeout_ns) {
  Batch batch(devices, rank);
  batch.add(algorithm, spec, timeout_ns);
  if (batch.run().empty()) return {};
  const DeviceVerdict& verdict = devices.control(rank).verdict;
  EXPECT_EQ(verdict.state, DeviceVerdict::kReadable);
  return verdict;
}

/// Whether this rank waits for the absent rank in this collective, whose root is rank 0.
bool waits_for(DeviceAlgorithm algorithm, Collective collective, int rank) {
  if (algorithm == DeviceAlgorithm::kReduceChunks) return true;
  if (collective == Collective::kReduce || collective == Collective::kGather) return rank == 0;
  return collective != Collective::kBroadcast && collective != Collective::kScatter;
}

/// Three ranks of which the last never comes. Whether all ranks that waited named it, and in time. On a busy machine a
/// late rank may look absent to another one.
bool absent_rank_is_named(DeviceAlgorithm algorithm, Collective collective, uint64_t timeout_ns) {
  constexpr int kRanks = 3, kAbsent = 2;
  SimulatedDevices devices(small(kRanks, uint32_t(-2), 2));
  std::atomic<bool> named{true};
  as_threads(kRanks, [&](int rank) {
    if (rank == kAbsent) return;
    const Spec spec = spec_of(collective, 33, kRanks, 0);
    const auto began = Clock::now();
    Batch batch(devices, rank);
    batch.add(algorithm, spec, timeout_ns);
    const std::string wrong = batch.run();
    const auto took = Clock::now() - began;
    EXPECT_LT(took, std::chrono::seconds(20));
    if (took > 2 * std::chrono::nanoseconds(timeout_ns) + std::chrono::seconds(1)) named = false;
    if (wrong.empty()) {
      EXPECT_FALSE(waits_for(algorithm, collective, rank)) << describe(spec);
      return;
    }
    // A block that lacks the peer's arrival ends as a whole, and so do the others.
    EXPECT_NE(wrong.find(": 0 lanes ended well"), std::string::npos) << wrong;
    const DeviceVerdict& v = devices.control(rank).verdict;
    EXPECT_EQ(v.cause, Verdict::Cause::kWait) << wrong;
    EXPECT_EQ(v.how, Waited::kTimedOut);
    EXPECT_EQ(v.epoch, uint32_t(-1));
    EXPECT_EQ(v.wanted, uint32_t(-1));
    if (v.peer != kAbsent || !waits_for(algorithm, collective, rank)) named = false;
  });
  return named;
}

TEST(DeviceCollectivesFaults, AnAbsentRankEndsEveryWaitInTimeAndIsNamed) {
  for (const auto& [algorithm, collective] : kWays) {
    bool named = false;
    for (const uint64_t timeout_ms : {50, 1000, 5000}) {
      named = named || absent_rank_is_named(algorithm, collective, timeout_ms * kMillisecond);
    }
    EXPECT_TRUE(named) << kernel::name(algorithm) << " for collective " << int(collective);
  }
}

TEST(DeviceCollectivesFaults, AnAbsentRootIsNamedByItsReaders) {
  for (const DeviceAlgorithm algorithm :
       {DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks, DeviceAlgorithm::kExchangePieces}) {
    for (const Collective collective : {Collective::kBroadcast, Collective::kScatter}) {
      SimulatedDevices devices(small(3));
      as_threads(3, [&](int rank) {
        if (rank == 1) return;
        const DeviceVerdict v = run(devices, rank, algorithm, spec_of(collective, 30, 3, 1), 50 * kMillisecond);
        EXPECT_EQ(v.cause, Verdict::Cause::kWait);
        EXPECT_EQ(v.peer, 1);
      });
    }
  }
}

TEST(DeviceCollectivesFaults, TheAbortWordEndsAWaitThatHasNoDeadline) {
  SimulatedDevices devices(small(2));
  as_threads(2, [&](int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::atomic_ref(devices.control(0).abort).store(1);
      return;
    }
    const DeviceVerdict v =
        run(devices, 0, DeviceAlgorithm::kExchangePackets, spec_of(Collective::kBarrier, 0, 2, 0), 0);
    EXPECT_EQ(v.how, Waited::kAlarmed);
    EXPECT_EQ(v.peer, 1);
    EXPECT_EQ(v.epoch, 1u);
  });
}

/// A general kernel that was aborted before it began leaves the outputs alone, whether it would have to wait or not:
/// its first block reads the abort word, and other blocks may have sent. A specialized one sends first, and sees the
/// abort where it waits.
TEST(DeviceCollectivesFaults, AnAbortedRankBeginsNothing) {
  for (const auto& [algorithm, collective] : kWays) {
    for (const uint32_t blocks : {1u, 2u}) {
      SimulatedDevices devices(small(2, 41, blocks));
      std::atomic_ref(devices.control(0).abort).store(1);
      Batch batch(devices, 0);
      batch.add(algorithm, spec_of(collective, 33, 2, 0));
      const Bytes before = batch.result(0), there(devices.pad(1).begin(), devices.pad(1).end());
      const std::string failure = batch.run();
      EXPECT_NE(failure, "");
      const bool sends_first = batch.is_hot();  // it sees the abort where it waits
      const DeviceVerdict& v = devices.control(0).verdict;
      if (blocks == 1) {
        EXPECT_NE(failure.find(": 0 lanes ended well"), std::string::npos);
        EXPECT_EQ(batch.result(0), before);
        EXPECT_EQ(std::equal(there.begin(), there.end(), devices.pad(1).begin()), !sends_first)
            << "it writes to others";
        EXPECT_TRUE(v.peer == -1 || (sends_first && v.peer == 1)) << v.peer;
      }
      EXPECT_EQ(v.state, DeviceVerdict::kReadable);
      EXPECT_EQ(v.how, Waited::kAlarmed);
      EXPECT_EQ(v.epoch, 42u);
    }
  }
}

/// A rank that is alone never waits. Wherever a launch is aborted, its finished operations are complete, and those
/// after the current one do not begin.
TEST(DeviceCollectivesFaults, AnAbortWithinALaunchEndsIt) {
  constexpr size_t kJobs = 3;
  for (const auto& [algorithm, collective] : kWays) {
    uint32_t last = 0, cut_short = 0;
    for (uint32_t look = 1; last == 0; ++look) {
      SimulatedDevices devices(small(1));
      devices.fault(0).abort_at = look;
      Batch batch(devices, 0);
      for (size_t i = 0; i < kJobs; ++i) batch.add(algorithm, spec_of(collective, 60, 1, i));
      std::vector<Bytes> before;
      for (size_t i = 0; i < kJobs; ++i) before.push_back(batch.result(i));
      if (batch.run().empty()) {
        last = look;
        continue;
      }
      const DeviceVerdict& v = devices.control(0).verdict;
      ASSERT_EQ(v.how, Waited::kAlarmed);
      ASSERT_TRUE(v.epoch >= 1 && v.epoch <= kJobs);
      cut_short += v.epoch < kJobs;
      for (size_t i = 0; i + 1 < v.epoch; ++i) EXPECT_EQ(batch.verdict(i), "");
      for (size_t i = v.epoch; i < kJobs; ++i) EXPECT_EQ(batch.result(i), before[i]) << "look " << look;
      EXPECT_EQ(kernel::least_ended(devices.control(0), 1).epoch, 0u);
    }
    EXPECT_GT(last, kJobs) << "each operation reads the abort word at least once";
    EXPECT_GE(cut_short, 2u);
  }
}

/// A root that waits for none: if it is aborted between two operations of a launch, it has sent the first and nothing
/// more.
TEST(DeviceCollectivesFaults, AnAbortBetweenOperationsLeavesTheOthersAlone) {
  const Spec spec = spec_of(Collective::kBroadcast, 30, 2, 0);
  const auto sent = [&](size_t operations, uint32_t abort_at) {
    SimulatedDevices devices(small(2));
    devices.fault(0).abort_at = abort_at;
    Batch batch(devices, 0);
    for (size_t i = 0; i < operations; ++i) batch.add(DeviceAlgorithm::kExchangePackets, spec);
    EXPECT_EQ(batch.run().empty(), abort_at == 0);
    return Bytes(devices.pad(1).begin(), devices.pad(1).end());
  };
  EXPECT_EQ(sent(2, 2), sent(1, 0));
  EXPECT_NE(sent(2, 0), sent(1, 0));
}

/// Two ranks with different calls both detect it in this operation, and report the other one's call.
TEST(DeviceCollectivesFaults, EveryKindOfMismatchIsSeenByBoth) {
  const Spec usual{.collective = Collective::kAllReduce, .counts = {40, 40}};
  std::vector<std::pair<DeviceAlgorithm, Spec>> others(6, {DeviceAlgorithm::kReducePackets, usual});
  others[0] = {DeviceAlgorithm::kExchangePackets, {.collective = Collective::kBarrier, .counts = {0, 0}}};
  others[1].second.dtype = DType::kI32;
  others[2].second.op = ReduceOp::kMax;
  others[3].second.counts = {39, 39};
  others[4].first = DeviceAlgorithm::kReduceChunks;
  others[5] = {DeviceAlgorithm::kExchangeChunks, {.collective = Collective::kAllGather, .counts = {40, 40}}};
  for (const auto& [algorithm, spec] : others) {
    SimulatedDevices devices(small(2));
    as_threads(2, [&, algorithm = algorithm, spec = spec](int rank) {
      const DeviceVerdict v = rank == 0 ? run(devices, 0, DeviceAlgorithm::kReducePackets, usual, kTimeout)
                                        : run(devices, 1, algorithm, spec, kTimeout);
      EXPECT_EQ(v.cause, Verdict::Cause::kMismatch) << describe(spec);
      EXPECT_EQ(v.peer, 1 - rank);
      EXPECT_NE(std::memcmp(v.mine, v.theirs, sizeof v.mine), 0);
    });
    EXPECT_EQ(
        std::memcmp(devices.control(0).verdict.mine, devices.control(1).verdict.theirs, sizeof(kernel::Fingerprint)),
        0);
  }
}

TEST(DeviceCollectivesFaults, CountsThatDifferByPairAreNamed) {
  for (const DeviceAlgorithm algorithm :
       {DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks, DeviceAlgorithm::kExchangePieces}) {
    SimulatedDevices devices(small(2));
    as_threads(2, [&](int rank) {
      Batch batch(devices, rank);
      batch.add(algorithm, {.collective = Collective::kAllToAll, .counts = {51, 50}}, 200 * kMillisecond);
      // Rank 0 sends one element less to rank 1 than rank 1 expects.
      if (rank == 0) batch.piece(1).bytes -= 4;
      const std::string wrong = batch.run();
      if (rank == 0) return;  // with packets it succeeds, otherwise it times out
      EXPECT_NE(wrong, "");
      const DeviceVerdict& v = devices.control(1).verdict;
      EXPECT_EQ(v.cause, Verdict::Cause::kCounts);
      EXPECT_EQ(v.mine[kernel::kBytesWord], 200u);
      EXPECT_EQ(v.theirs[kernel::kBytesWord], 196u);
    });
  }
}

/// Each rank is its own root and waits for none. They detect it when they wait for space.
TEST(DeviceCollectivesFaults, RootsThatDifferAreSeenWhenTheCreditIsUsedUp) {
  for (const uint32_t first : {uint32_t(0), uint32_t(-2)}) {
    SimulatedDevices devices(small(2, first));
    as_threads(2, [&](int rank) {
      Spec spec{.collective = Collective::kBroadcast, .root = rank, .counts = {10, 10}};
      DeviceVerdict v = run(devices, rank, DeviceAlgorithm::kExchangePackets, spec, kTimeout);
      EXPECT_EQ(v.cause, Verdict::Cause::kNone) << "no rank has received anything yet";
      for (uint32_t i = 0; i < kernel::kBuffers && v.cause == Verdict::Cause::kNone; ++i) {
        v = run(devices, rank, DeviceAlgorithm::kExchangePackets, spec, kTimeout);
      }
      EXPECT_EQ(v.cause, Verdict::Cause::kMismatch);
      EXPECT_EQ(v.peer, 1 - rank);
    });
  }
}

TEST(DeviceCollectivesFaults, AfterAFailureNoOperationWritesAnything) {
  SimulatedDevices devices(small(2));
  std::atomic_ref(devices.state(0).failed).store(1);
  Batch batch(devices, 0);
  batch.add(DeviceAlgorithm::kReducePackets, spec_of(Collective::kAllReduce, 30, 2, 0));
  const Bytes before(batch.out(), batch.out() + 120), there(devices.pad(1).begin(), devices.pad(1).end());
  EXPECT_NE(batch.run(), "");
  EXPECT_TRUE(std::equal(before.begin(), before.end(), batch.out()));
  EXPECT_TRUE(std::equal(there.begin(), there.end(), devices.pad(1).begin())) << "nor with the others";
}

// ---- Stamps that wrap

template <uint32_t kEvery>
struct NarrowStamps : kernel::PushRules {
  static constexpr uint32_t kStampMask = 7;
  static constexpr uint32_t kRestampEvery = kEvery;
};

/// Runs specs on two ranks, one kernel each; rank 1 is delayed. Returns the number of failures.
template <class Rules>
int count_wrong(const std::vector<std::pair<DeviceAlgorithm, Spec>>& specs,
                InjectedFault::Kind kind = InjectedFault::Kind::kNone, uint64_t timeout_ns = kTimeout) {
  SimulatedDevices devices({{2, 1, 128, 64}, 3, 0, 0});
  devices.fault(1) = {kind, 400, 1};
  devices.fault(0) = {kind, 0, 0};
  std::atomic<int> wrong{0};
  as_threads(2, [&](int rank) {
    for (const auto& [algorithm, spec] : specs) {
      Batch batch(devices, rank);
      batch.add(algorithm, spec, timeout_ns);
      if (!batch.run<Rules>().empty()) ++wrong;
    }
  });
  return wrong;
}

/// Sums, each after so many operations without packets that a stamp repeats.
std::vector<std::pair<DeviceAlgorithm, Spec>> sums_between_barriers() {
  std::vector<std::pair<DeviceAlgorithm, Spec>> specs;
  for (uint64_t round = 0; round < 12; ++round) {
    specs.emplace_back(DeviceAlgorithm::kReducePackets, spec_of(Collective::kAllReduce, 100, 2, round));
    for (int i = 0; i < 7; ++i)
      specs.emplace_back(DeviceAlgorithm::kExchangePackets, spec_of(Collective::kBarrier, 0, 2, 0));
  }
  return specs;
}

TEST(DeviceCollectivesWrap, StampsThatComeRoundAgainAreStampedAnewBefore) {
  EXPECT_EQ(count_wrong<NarrowStamps<4>>(sums_between_barriers()), 0);
}

/// A root meets no rank: its record of its receivers must not become so old that it looks new.
TEST(DeviceCollectivesWrap, OldArrivalIsStampedAnew) {
  const kernel::DeviceShape shape{2, 1, 128, 64};
  SimulatedDevices devices({shape, 3, uint32_t(-20), 0});
  constexpr uint32_t kRounds = 41;
  as_threads(2, [&](int rank) {
    for (uint64_t round = 0; round < kRounds; ++round) {
      Batch batch(devices, rank);
      batch.add(DeviceAlgorithm::kExchangePackets, spec_of(Collective::kBroadcast, 20, 2, 2 * round));
      ASSERT_EQ(batch.run<NarrowStamps<4>>(), "");
    }
  });
  const auto* state = reinterpret_cast<const std::byte*>(&devices.state(0));
  kernel::PipeState pipe;
  std::memcpy(&pipe, state + kernel::DeviceState{shape}.pipe(0, 1), sizeof pipe);
  EXPECT_LE(uint32_t(-20) + kRounds - pipe.last_met, 4 + 2 * kernel::kBuffers);
}

// ---- Negative controls: with a rule of the channel broken, wrong results must appear.

std::vector<std::pair<DeviceAlgorithm, Spec>> many_specs(DeviceAlgorithm algorithm, Collective collective, size_t n) {
  std::vector<std::pair<DeviceAlgorithm, Spec>> specs;
  for (uint64_t round = 0; round < 30; ++round) {
    specs.emplace_back(algorithm, spec_of(collective, n, 2, is_rooted(collective) ? 2 * round : round));
  }
  return specs;
}

#if defined(__SANITIZE_THREAD__)
// The others are races here, and show their failure without ThreadSanitizer. Only ThreadSanitizer can show this one: on
// many machines a signal without release is the same instruction, and the model (flag_model_test.cc) knows only
// "ordered" and "not ordered".

/// Runs this test binary, in one shard, with one test that is disabled otherwise. Returns its exit code and output.
std::pair<int, std::string> run_apart(const std::string& test) {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command =
      "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX TSAN_OPTIONS='exitcode=66 halt_on_error=1' '" + self +
      "' --gtest_also_run_disabled_tests --gtest_filter='" + test + "' 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  if (!pipe) return {-1, "no pipe"};
  std::string text;
  char line[512];
  while (std::fgets(line, sizeof line, pipe)) text += line;
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
}

void exchange_chunks_with(InjectedFault::Kind kind) {
  EXPECT_EQ(
      count_wrong<kernel::PushRules>(many_specs(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 300), kind),
      0);
}
TEST(DeviceCollectivesControls, DISABLED_SignalsThatRelease) { exchange_chunks_with(InjectedFault::Kind::kNone); }
TEST(DeviceCollectivesControls, DISABLED_SignalsThatDoNot) {
  exchange_chunks_with(InjectedFault::Kind::kRelaxedSignal);
}

TEST(DeviceCollectivesControls, ASignalThatDoesNotReleaseIsARace) {
  const auto [well, silence] = run_apart("DeviceCollectivesControls.DISABLED_SignalsThatRelease");
  EXPECT_EQ(well, 0) << silence;
  const auto [raced, report] = run_apart("DeviceCollectivesControls.DISABLED_SignalsThatDoNot");
  EXPECT_EQ(raced, 66) << report;
  EXPECT_NE(report.find("data race"), std::string::npos) << report;
}
#else

/// Whether the specs go wrong. A broken rule may need several tries to show.
template <class Rules>
bool go_wrong(const std::vector<std::pair<DeviceAlgorithm, Spec>>& specs,
              InjectedFault::Kind kind = InjectedFault::Kind::kNone, uint64_t timeout_ns = kTimeout) {
  for (int tries = 0; tries < 20; ++tries) {
    if (count_wrong<Rules>(specs, kind, timeout_ns) > 0) return true;
  }
  return false;
}

TEST(DeviceCollectivesControls, WithoutRestampingOldPacketsAreTakenForNew) {
  EXPECT_TRUE(go_wrong<NarrowStamps<1u << 24>>(sums_between_barriers()));
}

struct SingleSlot : kernel::PushRules {
  static constexpr uint32_t kSlots = 1;
};
struct NoCredits : kernel::PushRules {
  static constexpr bool kCredits = false;
};

struct Unmet : kernel::PushRules {
  static constexpr bool kMeets = false;
};

TEST(DeviceCollectivesControls, WithoutMeetingAMismatchGoesUnseen) {
  SimulatedDevices devices(small(2));
  as_threads(2, [&](int rank) {
    Spec spec{.collective = Collective::kAllReduce, .counts = {40, 40}};
    spec.op = rank == 0 ? ReduceOp::kSum : ReduceOp::kMax;
    Batch batch(devices, rank);
    batch.add(DeviceAlgorithm::kReducePackets, spec);
    EXPECT_EQ(batch.run<Unmet>(), "") << "each gets what it requests, and no verdict shows that they differ";
    EXPECT_EQ(devices.control(rank).verdict.state, 0u);
  });
}

/// A rank times out in its wait for a packet that was overwritten.
TEST(DeviceCollectivesControls, WithoutTheDoubleBufferPacketsAreLost) {
  const auto specs = many_specs(DeviceAlgorithm::kReducePackets, Collective::kAllReduce, 100);
  EXPECT_EQ(count_wrong<kernel::PushRules>(specs), 0);
  EXPECT_TRUE(go_wrong<SingleSlot>(specs, InjectedFault::Kind::kNone, 300 * kMillisecond));
}

TEST(DeviceCollectivesControls, WithoutCreditARootOverrunsItsReaders) {
  for (const DeviceAlgorithm algorithm :
       {DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks, DeviceAlgorithm::kExchangePieces}) {
    const auto specs = many_specs(algorithm, Collective::kBroadcast, 100);
    EXPECT_EQ(count_wrong<kernel::PushRules>(specs), 0);
    EXPECT_TRUE(go_wrong<NoCredits>(specs, InjectedFault::Kind::kNone, 300 * kMillisecond));
  }
}

/// The first operations restamp all packets. Without the barrier behind that, a stale stamp replaces a fresh arrival.
TEST(DeviceCollectivesControls, WithoutTheBarrierOfRestampsArrivalsAreLost) {
  const std::pair<DeviceAlgorithm, Collective> ways[] = {{DeviceAlgorithm::kExchangeChunks, Collective::kAllGather},
                                                         {DeviceAlgorithm::kReduceChunks, Collective::kAllReduce}};
  for (const auto& [algorithm, collective] : ways) {
    const auto specs = many_specs(algorithm, collective, 300);
    EXPECT_EQ(count_wrong<kernel::PushRules>(specs), 0);
    EXPECT_TRUE(go_wrong<kernel::PushRules>(specs, InjectedFault::Kind::kNoSync, 2000 * kMillisecond))
        << kernel::name(algorithm);
  }
}

/// A lane reads a chunk that only another lane has seen arrive. (A sum would wait for it in any slot.) It may also read
/// an address that another lane is just writing, so a process of its own may crash.
TEST(DeviceCollectivesControls, LanesThatDecideAloneReadTooEarly) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  constexpr int kAllWell = 42;
  const auto run_all = [] {
    const auto specs = many_specs(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 300);
    std::_Exit(go_wrong<kernel::PushRules>(specs, InjectedFault::Kind::kLoneVerdicts, 2000 * kMillisecond) ? 0
                                                                                                           : kAllWell);
  };
  EXPECT_EXIT(
      run_all(), [](int status) { return !WIFEXITED(status) || WEXITSTATUS(status) != kAllWell; }, "");
}

TEST(DeviceCollectivesControls, ALostSignalEndsInAVerdict) {
  const auto specs = many_specs(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 30);
  EXPECT_TRUE(go_wrong<kernel::PushRules>(specs, InjectedFault::Kind::kLostSignal, 100 * kMillisecond));
}
#endif

}  // namespace
}  // namespace nvx::test
