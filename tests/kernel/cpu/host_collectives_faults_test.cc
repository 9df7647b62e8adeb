// The algorithms beside a rank that fails, and negative controls: the tests must fail if a rule of the channel is
// dropped.

#include <gtest/gtest.h>

#include "kernel/cpu/host_collectives.h"
#include "support/channels.h"
#include "support/ranks.h"
#include "support/specs.h"

namespace nvx::test {
namespace {

using kernel::Algorithm;
using kernel::Collective;
using kernel::Verdict;
using std::chrono::milliseconds;

struct Route {
  Collective collective;
  Algorithm algorithm;
  int root;
};

/// The root with which rank 0 of two waits for rank 1's data; -1: there is none.
int root_for_rank_0(Collective c) { return !is_rooted(c) ? -1 : sends_from_root(c) ? 1 : 0; }

Verdict run(Channels& channels, int rank, Algorithm algorithm, Side& side, milliseconds timeout) {
  const WaitRules rules = rules_of(timeout);
  CpuExec ex(side.width(), kernel::level().reduce(DType::kF32, ReduceOp::kSum), channels[rank].factors().data(), rules);
  if (run_on_cpu(algorithm, ex, channels[rank], side.args())) return {};
  EXPECT_NE(ex.verdict().cause, Verdict::Cause::kNone);
  return ex.verdict();
}

TEST(Faults, AnAbsentRankEndsEveryWaitInTimeAndIsNamed) {
  constexpr int kRanks = 3, kAbsent = 2;
  for (const HostAlgorithm& row : kHostAlgorithms) {
    if (sends_from_root(row.collective)) continue;  // AnAbsentRootIsNamedByItsReaders
    Channels channels(kRanks, uint32_t(-2));
    Spec spec{.collective = row.collective, .root = root_for_rank_0(row.collective), .counts = {3000, 3000, 3000}};
    as_threads(kRanks, [&](int rank) {
      if (rank == kAbsent) return;
      Side side(spec, rank, kRanks);
      const auto began = Clock::now();
      const Verdict verdict = run(channels, rank, row.algorithm, side, milliseconds(100));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
      if (spec.root >= 0 && rank != spec.root && !row.waits_for_all) return;
      EXPECT_EQ(verdict.cause, Verdict::Cause::kWait) << kernel::name(row.algorithm) << " rank " << rank;
      EXPECT_EQ(verdict.how, Waited::kTimedOut);
      EXPECT_EQ(verdict.peer, kAbsent);
      EXPECT_FALSE(reached(verdict.seen, verdict.wanted));
    });
  }
}

/// Rank 0 arrives in its first operation, and does no more.
bool arrive(Channels& channels, Side& root) {
  const WaitRules rules = rules_of(milliseconds(1000));
  CpuExec ex(root.width(), nullptr, nullptr, rules);
  if (!channels[0].enter(ex)) return false;
  channels[0].arrive(ex, root.args().call, kernel::Staging::kLeased);
  return true;
}

/// The lender's caller may change its data once the operation has failed there, or the rank has left.
TEST(Faults, DataOfALenderThatFailsBeforeItIsReadIsRefused) {
  const Spec spec{.collective = Collective::kBroadcast, .root = 0, .counts = {3000}};
  enum class Lender { kStands, kFails, kLeaves };
  for (const Lender lender : {Lender::kStands, Lender::kFails, Lender::kLeaves}) {
    Channels channels(2);
    Side root(spec, 0, 2), reader(spec, 1, 2);
    channels.lend(0, root.in());
    ASSERT_TRUE(arrive(channels, root));
    if (lender == Lender::kFails) channels.pad(0).header().failure.write({.code = Code::kTimeout});
    if (lender == Lender::kLeaves) channels.pad(0).header().presence = kernel::Presence::kLeft;
    const Verdict verdict = run(channels, 1, Algorithm::kPublishPipelined, reader, milliseconds(1000));
    if (lender == Lender::kStands) {
      EXPECT_EQ(verdict.cause, Verdict::Cause::kNone);
      EXPECT_EQ(reader.verdict(), "");
      continue;
    }
    EXPECT_EQ(verdict.how, Waited::kAlarmed);
    EXPECT_EQ(verdict.peer, 0);
    EXPECT_FALSE(reached(channels.pad(1).done().value, stamp(1, 0))) << "the lender would take its data as read";
  }
}

TEST(Faults, ARankThatStagesMayLeaveBeforeOthersHaveReadLentData) {
  const Spec spec{.collective = Collective::kBroadcast, .root = 0, .counts = {3000}};
  Channels channels(3);
  Side root(spec, 0, 3), reader(spec, 1, 3);
  channels.lend(0, root.in());
  ASSERT_TRUE(arrive(channels, root));
  channels.pad(2).header().presence = kernel::Presence::kLeft;
  EXPECT_EQ(run(channels, 1, Algorithm::kPublishPipelined, reader, milliseconds(1000)).cause, Verdict::Cause::kNone);
}

TEST(Faults, ALenderEndsWhenAllHaveReadItsData) {
  const Spec spec{.collective = Collective::kBroadcast, .root = 0, .counts = {3000}};
  Channels channels(2);
  Side root(spec, 0, 2);
  channels.lend(0, root.in());
  const Verdict verdict = run(channels, 0, Algorithm::kPublishPipelined, root, milliseconds(50));
  EXPECT_EQ(verdict.how, Waited::kTimedOut);
  EXPECT_EQ(verdict.peer, 1);
}

TEST(Faults, DataThatIsLentFromOutsideTheMemoryOfTensorsIsRefused) {
  const Spec spec{.collective = Collective::kBroadcast, .root = 0, .counts = {3000}};
  for (const uint64_t offset : {uint64_t(1) << 62, (uint64_t(1) << 62) - 11999, ~uint64_t(0)}) {
    Channels channels(2);
    Side root(spec, 0, 2), reader(spec, 1, 2);
    channels[0].lend(offset, Channels::kLease);
    ASSERT_TRUE(arrive(channels, root));
    const Verdict verdict = run(channels, 1, Algorithm::kPublishPipelined, reader, milliseconds(1000));
    EXPECT_EQ(verdict.cause, Verdict::Cause::kBadLease);
    EXPECT_EQ(verdict.peer, 0);
  }
}

TEST(Faults, AnAbsentRootIsNamedByItsReaders) {
  constexpr int kRoot = 1;
  for (const HostAlgorithm& row : kHostAlgorithms) {
    if (!sends_from_root(row.collective)) continue;
    Channels channels(3);
    as_threads(3, [&](int rank) {
      if (rank == kRoot) return;
      Side side({.collective = row.collective, .root = kRoot, .counts = {3000, 3000, 3000}}, rank, 3);
      const Verdict verdict = run(channels, rank, row.algorithm, side, milliseconds(100));
      EXPECT_EQ(verdict.cause, Verdict::Cause::kWait) << kernel::name(row.algorithm);
      EXPECT_EQ(verdict.peer, kRoot);
    });
  }
}

TEST(Faults, AnAlarmEndsAWaitThatHasNoDeadline) {
  Channels channels(2);
  Alarm alarm;
  as_threads(2, [&](int rank) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(50));
      alarm.on = true;
      return;
    }
    Side side({.counts = {0}}, 0, 2);
    const WaitRules rules{Deadline::after(milliseconds(0)), {}, &alarm};
    CpuExec ex(4, nullptr, nullptr, rules);
    EXPECT_FALSE(run_on_cpu(Algorithm::kBarrier, ex, channels[0], side.args()));
    EXPECT_EQ(ex.verdict().how, Waited::kAlarmed);
    EXPECT_EQ(alarm.recorded, 1);
  });
}

/// Two ranks with different calls both detect it in this operation.
TEST(Faults, EveryKindOfMismatchIsSeenByBoth) {
  const Spec usual{.collective = Collective::kAllReduce, .counts = {100}};
  std::vector<Spec> others(5, usual);
  others[0].collective = Collective::kBarrier;
  others[1].dtype = DType::kI32;
  others[2].op = ReduceOp::kMax;
  others[3].counts = {99};
  others[4].collective = Collective::kReduce, others[4].root = 0;
  for (const Spec& other : others) {
    Channels channels(2);
    as_threads(2, [&](int rank) {
      Side side(rank == 0 ? usual : other, rank, 2);
      const Algorithm algorithm =
          rank == 1 && other.collective == Collective::kBarrier ? Algorithm::kBarrier : Algorithm::kReduceOneShot;
      const Verdict verdict = run(channels, rank, algorithm, side, milliseconds(5000));
      const bool leaves_at_once =
          rank == 1 && other.collective == Collective::kReduce;  // to a root from which it expects nothing
      EXPECT_EQ(verdict.cause, leaves_at_once ? Verdict::Cause::kNone : Verdict::Cause::kMismatch) << describe(other);
    });
  }
}

/// A rank that returned before the mismatch was visible carries it in its history to the next operation.
TEST(Faults, AMismatchThatOneRankCouldNotSeeIsSeenAtItsNextOperation) {
  Channels channels(2);
  as_threads(2, [&](int rank) {
    Side send({.collective = Collective::kBroadcast, .root = 0, .counts = {10}}, rank, 2);
    Side other({.collective = Collective::kBroadcast, .root = 0, .counts = {11}}, rank, 2);
    const Verdict first = run(channels, rank, Algorithm::kPublishOneShot, rank == 0 ? send : other, milliseconds(5000));
    EXPECT_EQ(first.cause, rank == 0 ? Verdict::Cause::kNone : Verdict::Cause::kMismatch);
    Side barrier({.counts = {0}}, rank, 2);
    EXPECT_EQ(run(channels, rank, Algorithm::kBarrier, barrier, milliseconds(5000)).cause, Verdict::Cause::kMismatch);
  });
}

/// Each rank is its own root and waits for none. They detect it when they wait for each other's credit.
TEST(Faults, RootsThatDifferAreSeenWhenTheCreditIsUsedUp) {
  for (const Route& route :
       {Route{Collective::kBroadcast, Algorithm::kPublishOneShot, 0},
        Route{Collective::kReduce, Algorithm::kReduceOneShot, 1}, Route{Collective::kScatter, Algorithm::kExchange, 0},
        Route{Collective::kGather, Algorithm::kExchange, 1}}) {
    for (const uint32_t first : {uint32_t(0), uint32_t(-3)}) {
      Channels channels(2, first);
      as_threads(2, [&](int rank) {
        const int root = route.root == 0 ? rank : 1 - rank;
        Side side({.collective = route.collective, .root = root, .counts = {10, 10}}, rank, 2);
        for (uint32_t i = 0; i < kernel::kEpochs; ++i) {
          EXPECT_EQ(run(channels, rank, route.algorithm, side, milliseconds(5000)).cause, Verdict::Cause::kNone);
        }
        const Verdict verdict = run(channels, rank, route.algorithm, side, milliseconds(5000));
        EXPECT_EQ(verdict.cause, Verdict::Cause::kMismatch) << int(route.collective);
        EXPECT_EQ(verdict.wanted, stamp(first + 1, 0)) << "the first operation that differed";
      });
    }
  }
}

/// A root that streams does not wait until its timeout for a rank that called another operation.
TEST(Faults, ARootThatStreamsNamesARankWithAnotherCall) {
  for (const Route& route : {Route{Collective::kBroadcast, Algorithm::kPublishPipelined, 0},
                             Route{Collective::kScatter, Algorithm::kExchange, 0}}) {
    Channels channels(2);
    as_threads(2, [&](int rank) {
      Side large({.collective = route.collective, .root = 0, .counts = {200'000, 200'000}}, rank, 2);
      Side small({.collective = Collective::kBroadcast, .root = 1, .counts = {1, 1}}, rank, 2);
      const auto began = Clock::now();
      const Verdict verdict = rank == 0 ? run(channels, rank, route.algorithm, large, milliseconds(20'000))
                                        : run(channels, rank, Algorithm::kPublishOneShot, small, milliseconds(20'000));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
      EXPECT_EQ(verdict.cause, rank == 0 ? Verdict::Cause::kMismatch : Verdict::Cause::kNone);
    });
  }
}

TEST(Faults, CountsThatDifferByPairAreNamed) {
  for (const size_t n : {size_t(50), size_t(30000)}) {
    Channels channels(2);
    as_threads(2, [&](int rank) {
      // Rank 0 sends n - 1 to rank 1, which expects n.
      Side side({.collective = Collective::kAllToAll, .counts = {n, n}}, rank, 2);
      std::vector<kernel::Piece> send = side.send();
      if (rank == 0) send[1].bytes -= 4;
      kernel::CollectiveArgs args = side.args();
      args.send = send.data();
      const WaitRules rules = rules_of(milliseconds(500));
      CpuExec ex(4, nullptr, nullptr, rules);
      const bool ended = run_on_cpu(Algorithm::kExchange, ex, channels[rank], args);
      if (rank == 0) return;  // it is done, or still waits for rank 1 to fetch
      EXPECT_FALSE(ended);
      EXPECT_EQ(ex.verdict().cause, Verdict::Cause::kCounts);
      EXPECT_EQ(ex.verdict().mine, n * 4);
      EXPECT_EQ(ex.verdict().theirs, n * 4 - 4);
    });
  }
}

/// A lease outside the peer's arena is refused before it is accessed.
TEST(Faults, ALeaseOutsideTheArenaIsRefused) {
  const size_t pad = kernel::PadLayout(2).bytes();
  const std::pair<size_t, size_t> kForged[] = {
      {pad, 0}, {size_t(-4096), 8192}, {pad, size_t(1) << 40}, {pad, 1}, {pad, 100}};
  for (const auto& [offset, bytes] : kForged) {
    for (const HostAlgorithm& row : kHostAlgorithms) {
      if (row.through != Through::kLeases) continue;
      Channels channels(2);
      as_threads(2, [&, offset = offset, bytes = bytes](int rank) {
        Side side({.collective = row.collective, .root = root_for_rank_0(row.collective), .counts = {30000, 30000}},
                  rank, 2);
        if (rank == 1) {
          // The arrival of rank 1, with a false lease.
          kernel::Arrival& here = channels.pad(1).arrival(1);
          here.fingerprint = side.fingerprint();
          for (int p = 0; p < 2; ++p) channels.pad(1).counts(1)[p] = side.send()[size_t(p)].bytes;
          here.lease_offset = offset;
          here.lease_bytes = bytes;
          signal(here.flag, stamp(1, 0));
          return;
        }
        const Verdict verdict = run(channels, rank, row.algorithm, side, milliseconds(10'000));
        EXPECT_EQ(verdict.cause, Verdict::Cause::kBadLease)
            << kernel::name(row.algorithm) << " " << offset << " " << bytes;
      });
    }
  }
}

/// Numbers whose sums and products overflow are refused.
TEST(Faults, CountsThatNobodyCanHaveAreRefused) {
  constexpr uint64_t kForged[] = {uint64_t(1) << 63, (uint64_t(1) << 63) + 64, ~uint64_t(0),
                                  uint64_t(0) - 400, (uint64_t(1) << 48) + 1,  uint64_t(1) << 40};
  for (const uint64_t forged : kForged) {
    for (const bool leased : {true, false}) {
      Channels channels(3);
      // Rank 0 offers rank 2 the expected size, and the others false ones.
      Side side({.collective = Collective::kAllToAll, .counts = {100, 100, 100}}, 2, 3);
      kernel::Arrival& there = channels.pad(0).arrival(1);
      there.fingerprint = side.fingerprint();
      channels.pad(0).counts(1)[0] = forged;
      channels.pad(0).counts(1)[1] = leased ? 0 : uint64_t(0) - forged;
      channels.pad(0).counts(1)[2] = side.recv()[0].bytes;
      there.lease_offset = kernel::PadLayout(3).bytes();
      there.lease_bytes = leased ? 4096 : 0;
      signal(there.flag, stamp(1, 0));
      kernel::CollectiveArgs args = side.args();
      args.meets_all = false;
      args.meets = 0;
      const WaitRules rules = rules_of(milliseconds(500));
      CpuExec ex(4, nullptr, nullptr, rules);
      EXPECT_FALSE(run_on_cpu(Algorithm::kExchange, ex, channels[2], args)) << forged << " " << leased;
      EXPECT_EQ(ex.verdict().cause, Verdict::Cause::kBadLease) << forged << " " << leased;
    }
  }
}

TEST(Faults, GeometryOfAnyNumbersStaysInsideItsStaging) {
  for (const size_t staging : {size_t(0), size_t(63), size_t(4096), size_t(1) << 30}) {
    for (const size_t parts : {size_t(1), size_t(3), size_t(1000)}) {
      for (int bit = 0; bit < 64; ++bit) {
        for (const size_t longest :
             {(size_t(1) << bit) - 1, size_t(1) << bit, (size_t(1) << bit) + 1, ~size_t(0) << bit}) {
          const auto g = kernel::Geometry::of(staging, longest, parts);
          if (!g.possible(longest)) continue;
          ASSERT_LE(longest, kernel::kLongest);
          ASSERT_LE(g.part, staging / parts / g.depth);
          ASSERT_GE(g.part * g.chunks, longest);
        }
      }
    }
  }
}

// ---- Negative controls: with a rule of the channel broken, wrong sums must appear. Otherwise the rule is unnecessary,
// or the tests cannot detect it.

/// All epochs share one slot: no double buffering.
class OneSlot : public Channel {
 public:
  using Channel::Channel;
  std::byte* slot(int rank, size_t) { return pad(rank).slot(0); }
};

/// No rank waits for the arrival of another.
class NoMeeting : public Channel {
 public:
  using Channel::Channel;
  bool meet_all(CpuExec&) { return true; }
};

/// The reader dawdles between meeting and reading.
class LateReader : public CpuExec {
 public:
  explicit LateReader(const CpuExec& plain) : CpuExec(plain) {}
  void reduce(void* dst, const void* const* srcs, int ranks, size_t n) {
    std::this_thread::sleep_for(milliseconds(2));
    CpuExec::reduce(dst, srcs, ranks, n);
  }
};

/// How many of 30 all-reduces came out wrong somewhere, when rank 1 reads late and sends late.
template <class AnyChannel>
int wrong_sums() {
  constexpr int kRanks = 2, kRounds = 30;
  Channels channels(kRanks);
  std::atomic<int> wrong{0};
  as_threads(kRanks, [&](int rank) {
    AnyChannel channel(rank, channels.memory(), 0, /*rotates=*/true);
    for (uint64_t round = 0; round < kRounds; ++round) {
      Side side({.collective = Collective::kAllReduce, .counts = {1000}, .round = round}, rank, kRanks);
      const WaitRules rules = rules_of(std::chrono::seconds(20));
      const CpuExec plain(4, kernel::level().reduce(DType::kF32, ReduceOp::kSum), nullptr, rules);
      const kernel::CollectiveArgs args = side.args();
      LateReader late(plain);
      CpuExec prompt(plain);
      if (rank == 1 && round % 2) std::this_thread::sleep_for(milliseconds(1));
      const bool ended = rank == 1 ? reduce_one_shot(late, channel, args) : reduce_one_shot(prompt, channel, args);
      ASSERT_TRUE(ended);
      if (!side.verdict().empty()) ++wrong;
    }
  });
  return wrong;
}

#if defined(__SANITIZE_THREAD__)
TEST(Controls, DISABLED_BrokenRulesAreRacesAndProveNothingMoreHere) {}
#else
TEST(Controls, WithoutDoubleBufferingSumsAreWrong) {
  EXPECT_EQ(wrong_sums<Channel>(), 0);
  EXPECT_GT(wrong_sums<OneSlot>(), 0);
}

TEST(Controls, WithoutMeetingSumsAreWrong) { EXPECT_GT(wrong_sums<NoMeeting>(), 0); }

/// A broadcasting root that assumes all credits overwrites slots that are still read; with the true credits it does
/// not.
int wrong_broadcasts(bool lied_to) {
  constexpr uint64_t kRounds = 24;
  Channels channels(2);
  if (lied_to) channels.pad(1).done().value = stamp(1000, 0);
  int wrong = 0;
  as_threads(2, [&](int rank) {
    for (uint64_t round = 0; round < kRounds; ++round) {
      Side side({.collective = Collective::kBroadcast, .root = 0, .counts = {1000}, .round = round}, rank, 2);
      const WaitRules rules = rules_of(milliseconds(lied_to ? 500 : 20000));
      CpuExec ex(4, nullptr, nullptr, rules);
      if (rank == 1) std::this_thread::sleep_for(milliseconds(2));
      const kernel::CollectiveArgs args = side.args();
      // The listener does not report its own progress if the root gets a false report.
      const bool ended = run_on_cpu(Algorithm::kPublishOneShot, ex, channels[rank], args);
      if (rank == 1 && lied_to) channels.pad(1).done().value = stamp(1000, 0);
      if (rank == 1 && (!ended || !side.verdict().empty())) ++wrong;
    }
  });
  return wrong;
}

TEST(Controls, WithoutCreditABroadcastOverrunsItsReaders) {
  EXPECT_EQ(wrong_broadcasts(/*lied_to=*/false), 0);
  EXPECT_GT(wrong_broadcasts(/*lied_to=*/true), 0);
}
#endif

}  // namespace
}  // namespace nvx::test
