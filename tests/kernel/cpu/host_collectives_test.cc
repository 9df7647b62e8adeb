// The algorithms over plain memory, with ranks as threads: every collective, path, number of ranks, count, type and
// operator is compared with a reference, at epochs that wrap, at any alignment, and with delays.

#include "kernel/cpu/host_collectives.h"

#include <gtest/gtest.h>

#include "support/channels.h"
#include "support/epochs.h"
#include "support/ranks.h"
#include "support/specs.h"

namespace nvx::test {
namespace {

using kernel::Algorithm;
using kernel::Collective;

/// Runs a spec on one rank in the channel's next epoch.
std::string perform(Channels& channels, int rank, const Spec& spec, Algorithm algorithm, Watch* watch = nullptr,
                    bool lends = false) {
  Side side(spec, rank, channels.size());
  lends ? channels.lend(rank, side.in()) : channels.lease(rank);
  const WaitRules rules = rules_of(std::chrono::seconds(20), watch);
  const kernel::ReduceFn reduce = reduces(spec.collective) ? kernel::level().reduce(spec.dtype, spec.op) : nullptr;
  CpuExec ex(side.width(), reduce, channels[rank].factors().data(), rules);
  ex.keep_by(channels[rank].cache_policies().only().value_or(kernel::CachePolicy::kCached));
  if (!run_on_cpu(algorithm, ex, channels[rank], side.args())) {
    return describe(spec) + ": verdict " + std::to_string(int(ex.verdict().cause)) + " on rank " + std::to_string(rank);
  }
  return side.verdict();
}

/// All ranks run the specs in order, without synchronisation in between. After the first error no rank waits any more.
void perform_all(Channels& channels, const std::vector<std::pair<Spec, Algorithm>>& specs,
                 kernel::CachePolicy policy = kernel::CachePolicy::kCached) {
  Alarm failed;
  as_threads(channels.size(), [&](int rank) {
    channels[rank].cache_policies().only(policy);
    for (const auto& [spec, algorithm] : specs) {
      const std::string wrong = perform(channels, rank, spec, algorithm, &failed);
      if (wrong.empty()) continue;
      if (!failed.on.exchange(true)) ADD_FAILURE() << name(algorithm) << ": " << wrong;
      return;
    }
  });
  EXPECT_TRUE(channels.guards_are_whole()) << "a kernel wrote outside the staging";
}

class Grid : public testing::TestWithParam<std::tuple<int, uint32_t>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  uint32_t first_epoch() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Ranks, Grid,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5, 8), testing::ValuesIn(first_epochs())),
                         [](const auto& info) { return name_of(std::get<0>(info.param), std::get<1>(info.param)); });

TEST_P(Grid, EveryCollectiveAtEveryCount) {
  Channels channels(ranks(), first_epoch());
  std::vector<std::pair<Spec, Algorithm>> specs;
  uint64_t round = 0;
  for (const size_t n :
       {size_t(0), size_t(1), size_t(3), size_t(44), size_t(45), size_t(257), size_t(2049), size_t(9000)}) {
    for (const auto& [collective, algorithm, through, _] : kHostAlgorithms) {
      Spec spec{.collective = collective, .counts = counts_around(n, ranks(), collective), .round = ++round};
      if (is_rooted(collective)) spec.root = int(round) % ranks();
      spec.shift = round % 4;
      spec.in_place = round % 3 == 0;
      const size_t total = spec.counts[0] * 4 * size_t(ranks() + 1);
      if (through == Through::kSlots && total > kernel::kSlotBytes) continue;
      specs.emplace_back(spec, algorithm);
    }
  }
  for (const kernel::CachePolicy policy : {kernel::CachePolicy::kCached, kernel::CachePolicy::kPast}) {
    if (!HasFailure()) perform_all(channels, specs, policy);
  }
}

/// All ranks lend their data, or some do and the others stage theirs.
TEST(Lending, GivesTheSameResults) {
  for (const int ranks : {2, 3, 5}) {
    Channels channels(ranks, uint32_t(-2));
    Alarm failed;
    as_threads(ranks, [&](int rank) {
      uint64_t round = 0;
      for (const auto& [collective, algorithm, through, _] : kHostAlgorithms) {
        const bool rooted = collective == Collective::kBroadcast;
        if (through != Through::kLeases || (is_rooted(collective) && !rooted)) continue;
        for (const int every : {1, 2}) {
          const size_t n = collective == Collective::kAllToAll ? 20000 : 5001;  // too large for the slots
          Spec spec{.collective = collective, .counts = counts_around(n, ranks, collective), .round = ++round};
          if (rooted) spec.root = int(round) % ranks;
          spec.shift = round % 4;
          spec.in_place = collective == Collective::kAllReduce || (collective == Collective::kAllGather && every == 2);
          const bool lends = rank % every == 0 && (!rooted || spec.root == rank);
          const std::string wrong = perform(channels, rank, spec, algorithm, &failed, lends);
          if (wrong.empty()) continue;
          if (!failed.on.exchange(true)) ADD_FAILURE() << name(algorithm) << ", every " << every << ": " << wrong;
          return;
        }
      }
    });
    EXPECT_TRUE(channels.guards_are_whole());
  }
}

TEST_P(Grid, EveryTypeAndOperatorByEveryAlgorithm) {
  Channels channels(ranks(), first_epoch());
  std::vector<std::pair<Spec, Algorithm>> specs;
  uint64_t round = 0;
  for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
    for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
      const DType dtype = DType(t);
      const ReduceOp op = ReduceOp(o);
      if (!kernel::level().reduce(dtype, op)) continue;
      for (const auto& [collective, algorithm, through, _] : kHostAlgorithms) {
        if (!reduces(collective)) continue;
        // Half of these, in turn: all of them take minutes under qemu.
        if (collective != Collective::kAllReduce && (t + o + size_t(algorithm)) % 2 == 0) continue;
        Spec spec{.collective = collective, .dtype = dtype, .op = op, .counts = {}, .round = ++round};
        spec.counts = counts_around(through == Through::kSlots ? 37 : 1031, ranks(), collective);
        if (collective == Collective::kReduce) spec.root = int(round) % ranks();
        spec.shift = round % 8;
        specs.emplace_back(spec, algorithm);
      }
    }
  }
  perform_all(channels, specs);
}

TEST_P(Grid, TypesThatAreOnlyMoved) {
  Channels channels(ranks(), first_epoch());
  std::vector<std::pair<Spec, Algorithm>> specs;
  uint64_t round = 0;
  for (const DType dtype : {DType::kBytes, DType::kF16, DType::kF64, DType::kC128}) {
    for (const auto& [collective, algorithm, through, _] : kHostAlgorithms) {
      if (reduces(collective) || through == Through::kFlags) continue;
      const size_t n = through == Through::kSlots ? 11 : 5003;
      Spec spec{
          .collective = collective, .dtype = dtype, .counts = counts_around(n, ranks(), collective), .round = ++round};
      if (is_rooted(collective)) spec.root = int(round) % ranks();
      spec.shift = round % 16;
      specs.emplace_back(spec, algorithm);
    }
  }
  perform_all(channels, specs);
}

/// The same inputs give the same bits with every algorithm and staging.
TEST(HostCollectives, BitsDoNotDependOnAlgorithmOrStaging) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 3001;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<Bytes> results;
    const auto run = [&](Algorithm algorithm, size_t lease) {
      Channels channels(kRanks, 0, lease);
      std::vector<Bytes> outputs(kRanks);
      as_threads(kRanks, [&](int rank) {
        const Spec spec{.collective = Collective::kAllReduce, .dtype = dtype, .counts = {kCount}};
        Side side(spec, rank, kRanks);
        const WaitRules rules = rules_of(std::chrono::seconds(20));
        CpuExec ex(side.width(), kernel::level().reduce(dtype, ReduceOp::kSum), nullptr, rules);
        ASSERT_TRUE(run_on_cpu(algorithm, ex, channels[rank], side.args()));
        outputs[size_t(rank)].assign(side.out(), side.out() + kCount * side.width());
      });
      results.insert(results.end(), outputs.begin(), outputs.end());
    };
    for (const HostAlgorithm& row : kHostAlgorithms) {
      if (row.collective != Collective::kAllReduce) continue;
      for (const size_t lease : {size_t(6) << 10, size_t(256) << 10}) run(row.algorithm, lease);
    }
    for (const Bytes& result : results) EXPECT_TRUE(result == results[0]) << name(dtype);
  }
}

/// Delays before every operation make ranks arrive in every order. The roles rotate.
TEST(HostCollectives, OrderOfArrivalDoesNotMatter) {
  for (const int ranks : {2, 3, 4}) {
    Channels channels(ranks, uint32_t(-40));
    as_threads(ranks, [&](int rank) {
      for (uint64_t round = 0; round < 60; ++round) {
        const bool pipelined = round % 2 == 1;
        Spec spec{.counts = {pipelined ? size_t(4000) : size_t(400)}, .round = round};
        spec.collective = round % 3 == 0 ? Collective::kAllReduce : Collective::kReduce;
        if (spec.collective == Collective::kReduce) spec.root = int(round / 2) % ranks;
        Side side(spec, rank, ranks);
        const WaitRules rules = rules_of(std::chrono::seconds(20));
        SlowExec ex({4, kernel::level().reduce(DType::kF32, ReduceOp::kSum), nullptr, rules},
                    uint32_t(round * 8 + rank));
        const kernel::CollectiveArgs args = side.args();
        const bool ended =
            pipelined ? reduce_pipelined(ex, channels[rank], args) : reduce_one_shot(ex, channels[rank], args);
        ASSERT_TRUE(ended);
        ASSERT_EQ(side.verdict(), "");
      }
    });
  }
}

TEST(HostCollectives, PiecesArriveWhateverTheOrder) {
  for (const int ranks : {2, 3, 4}) {
    Channels channels(ranks, uint32_t(-40));
    as_threads(ranks, [&](int rank) {
      for (uint64_t round = 0; round < 60; ++round) {
        Spec spec{.counts = {}, .round = round};
        constexpr Collective kMoves[] = {Collective::kBroadcast, Collective::kGather, Collective::kAllToAll,
                                         Collective::kScatter, Collective::kAllGather};
        spec.collective = kMoves[round % 5];
        spec.counts = counts_around(round % 2 ? 5000 : 301, ranks, spec.collective);
        if (is_rooted(spec.collective)) spec.root = int(round / 2) % ranks;
        Side side(spec, rank, ranks);
        const WaitRules rules = rules_of(std::chrono::seconds(20));
        SlowExec ex({4, nullptr, nullptr, rules}, uint32_t(round * 8 + rank));
        const kernel::CollectiveArgs args = side.args();
        const bool publishes = spec.collective == Collective::kBroadcast || spec.collective == Collective::kAllGather;
        const bool ended = !publishes  ? exchange(ex, channels[rank], args)
                           : round % 2 ? publish_pipelined(ex, channels[rank], args)
                                       : publish_one_shot(ex, channels[rank], args);
        ASSERT_TRUE(ended);
        ASSERT_EQ(side.verdict(), "");
      }
    });
  }
}

/// The slots go through their memory several times, while ranks that do not meet are up to kEpochs operations apart.
TEST(HostCollectives, LongMessagesFollowOneAnotherThroughTheSlots) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = kernel::kSlotBytes / sizeof(float) - 100;
  for (const bool rotates : {true, false}) {
    Channels channels(kRanks, uint32_t(-10), Channels::kLease, rotates);
    std::vector<std::pair<Spec, Algorithm>> specs;
    for (int round = 1; round <= int(as_fast(100, 40)); ++round) {
      Spec spec{.collective = Collective::kBroadcast, .root = round / 20 % kRanks, .counts = {kCount - size_t(round)}};
      spec.round = uint64_t(round);
      if (round % 20 == 0) spec.collective = Collective::kAllReduce, spec.root = -1;
      specs.emplace_back(spec, spec.root < 0 ? Algorithm::kReduceOneShot : Algorithm::kPublishOneShot);
    }
    perform_all(channels, specs);
  }
}

TEST(HostCollectives, NobodyLeavesABarrierBeforeAllHaveCome) {
  constexpr int kRanks = 4;
  Channels channels(kRanks, uint32_t(-10));
  std::atomic<int> came{0};
  as_threads(kRanks, [&](int rank) {
    for (int round = 1; round <= 40; ++round) {
      if (rank == round % kRanks) std::this_thread::sleep_for(std::chrono::microseconds(300));
      came.fetch_add(1, std::memory_order_relaxed);
      ASSERT_EQ(perform(channels, rank, {.counts = {0}}, Algorithm::kBarrier), "");
      ASSERT_GE(came.load(std::memory_order_relaxed), round * kRanks);
    }
  });
}

}  // namespace
}  // namespace nvx::test
