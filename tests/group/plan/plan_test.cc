// The algorithms chosen, as a table: a changed threshold is a changed line here.

#include "group/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "support/sizes.h"
#include "support/specs.h"

namespace nvx::test {
namespace {

using kernel::Algorithm;
using kernel::Collective;

PlanFacts machine(size_t ranks, size_t l3_mb = 32) {
  return {.ranks = ranks, .cores = 2, .l2_bytes = 1 << 20, .l3_bytes = l3_mb << 20};
}

struct ExpectedChoice {
  Collective collective;
  size_t ranks;
  size_t bytes;
  const char* algorithm;
  size_t lease_kb;
};

// clang-format off
constexpr ExpectedChoice kChoices[] = {
    // collective              ranks   bytes     algorithm                    lease KiB
    {Collective::kAllReduce,       2,       0,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2,       8,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2,  64 * K,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2, 64*K+1,   "reduce_pipelined",            256},
    {Collective::kAllReduce,       2,   1 * M,  "reduce_pipelined",           2048},
    {Collective::kAllReduce,       2,  64 * M,  "reduce_pipelined",          3072},
    {Collective::kAllReduce,       4,  16 * K,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       4, 16*K+1,   "reduce_pipelined",            256},
    {Collective::kAllReduce,       4,  64 * M,  "reduce_pipelined",           3072},
    {Collective::kAllReduce,      64,  64 * M,  "reduce_pipelined",           1024},
    {Collective::kReduce,          2,  32 * K,  "reduce_one_shot",               0},
    {Collective::kReduce,          3,  32 * K,  "reduce_pipelined",            256},
    {Collective::kReduceScatter,   2,  64 * K,  "reduce_scatter_one_shot",       0},
    {Collective::kReduceScatter,   2,  65 * K,  "reduce_scatter_pipelined",    256},
    {Collective::kAllGather,       4,  64 * K,  "publish_one_shot",              0},
    {Collective::kAllGather,       4,   1 * M,  "publish_pipelined",          2048},
    {Collective::kBroadcast,       8,      64,  "publish_one_shot",              0},
    {Collective::kBroadcast,       8, 128 * K,  "publish_pipelined",           256},
    {Collective::kAllToAll,        4,       8,  "exchange",                      0},
    {Collective::kAllToAll,        4,   4 * M,  "exchange",                   3072},
    {Collective::kGather,          4,     100,  "exchange",                      0},
    {Collective::kScatter,         4,   1 * M,  "exchange",                   2048},
    {Collective::kBarrier,         4,       0,  "barrier",                       0},
};
// clang-format on

std::string row(Collective collective, size_t ranks, size_t bytes, const char* algorithm, size_t lease_kb) {
  char text[128];
  std::snprintf(text, sizeof text, "%-15s %3zu ranks %10zu B  %-25s %6zu KiB", name(collective), ranks, bytes,
                algorithm, lease_kb);
  return text;
}

TEST(Plan, IsThisTable) {
  for (const ExpectedChoice& e : kChoices) {
    const Choice choice = plan(e.collective, e.bytes, machine(e.ranks));
    EXPECT_EQ(row(e.collective, e.ranks, e.bytes, kernel::name(choice.algorithm), choice.lease_bytes >> 10),
              row(e.collective, e.ranks, e.bytes, e.algorithm, e.lease_kb));
  }
}

/// An algorithm without a row there is not compared with the reference.
TEST(Plan, ChoosesOnlyAmongTestedAlgorithms) {
  for (const Collective collective : kCollectives) {
    for (const Algorithm algorithm : host_algorithms_of(collective)) {
      EXPECT_TRUE(std::ranges::any_of(
          kHostAlgorithms,
          [&](const HostAlgorithm& row) { return row.collective == collective && row.algorithm == algorithm; }))
          << name(collective) << " by " << kernel::name(algorithm)
          << " has no row in kHostAlgorithms (tests/support/specs.h)";
    }
  }
}

TEST(Plan, TheUsersChoiceIsKeptWhereItIsPossible) {
  PlanFacts facts = machine(4);
  facts.force = PlanFacts::Force::kOneShot;
  EXPECT_EQ(plan(Collective::kAllReduce, 60 * K, facts).algorithm, Algorithm::kReduceOneShot);
  EXPECT_EQ(plan(Collective::kAllReduce, 65 * K, facts).algorithm, Algorithm::kReducePipelined);
  facts.force = PlanFacts::Force::kPipelined;
  EXPECT_EQ(plan(Collective::kAllReduce, 8, facts).algorithm, Algorithm::kReducePipelined);
  EXPECT_EQ(plan(Collective::kBarrier, 0, facts).algorithm, Algorithm::kBarrier);
  facts.force = PlanFacts::Force::kNothing;
  facts.tuning.set(Tune::kAllReduceOneShot, 100);
  EXPECT_EQ(plan(Collective::kAllReduce, 100, facts).algorithm, Algorithm::kReduceOneShot);
  EXPECT_EQ(plan(Collective::kAllReduce, 101, facts).algorithm, Algorithm::kReducePipelined);
  EXPECT_EQ(plan(Collective::kReduce, 101, facts).algorithm, Algorithm::kReduceOneShot);
  facts.tuning.set(Tune::kLease, 512 * K);
  EXPECT_EQ(plan(Collective::kAllReduce, 64 * M, facts).lease_bytes, 512 * K);
}

TEST(Plan, WritesPastTheCachesWhatDoesNotFitThemTogether) {
  const auto keep = [](size_t ranks, size_t bytes) { return policy_to_keep(bytes, machine(ranks)); };
  EXPECT_EQ(keep(2, 8 * M - 1), kernel::CachePolicy::kCached);
  EXPECT_EQ(keep(2, 8 * M), kernel::CachePolicy::kPast);
  EXPECT_EQ(keep(4, 4 * M - 1), kernel::CachePolicy::kCached);
  EXPECT_EQ(keep(4, 4 * M), kernel::CachePolicy::kPast);
  EXPECT_EQ(keep(1, 0), kernel::CachePolicy::kCached);
}

TEST(Plan, StagingRotatesWhereEveryRankHasACoreOfItsOwn) {
  PlanFacts facts = machine(2);
  facts.cores = 2, facts.l2_bytes = M, facts.l3_bytes = 32 * M;
  EXPECT_EQ(rotation(facts), 2 * M);
  facts.l3_bytes = 4 * M;
  EXPECT_EQ(rotation(facts), M) << "all ranks' staging fills half of the cache that they share";
  facts.cores = 1;
  EXPECT_EQ(rotation(facts), 0u);
}

/// On any machine, data within the limit fits the slot, and every lease has at least the smallest size.
TEST(Plan, StaysWithinTheSlotsAndTheStaging) {
  for (const size_t ranks : {1, 2, 3, 8, 100}) {
    for (const size_t l3 : {1, 16, 1024}) {
      for (int c = int(Collective::kAllReduce); c <= int(Collective::kBarrier); ++c) {
        EXPECT_LE(one_shot_limit(Collective(c), machine(ranks, l3)), kernel::kSlotBytes);
        for (size_t bytes = 1; bytes < (size_t(4) << 30); bytes *= 7) {
          const Choice choice = plan(Collective(c), bytes, machine(ranks, l3));
          EXPECT_LE(choice.lease_bytes, 16 * M);
          EXPECT_TRUE(choice.lease_bytes == 0 || choice.lease_bytes >= 256 * K);
          EXPECT_EQ(choice.lease_bytes == 0, bytes <= one_shot_limit(Collective(c), machine(ranks, l3)));
        }
      }
    }
  }
}

TEST(Plan, ExplainsItself) {
  const std::string text = explain(Collective::kAllReduce, 1 * M, machine(2));
  for (const char* part : {"all_reduce", "1048576 bytes", "2 ranks", "reduce_pipelined", "NVX_ALGO", "NVX_TUNE"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(explain(Collective::kAllReduce, 8, machine(1)),
            "all_reduce of 8 bytes a rank, 1 rank on one host: no other rank, so nothing is chosen");
  EXPECT_EQ(explain(Collective::kAllReduce, 0, machine(2)),
            "all_reduce of 0 bytes a rank, 2 ranks on one host: no data to move, so nothing is chosen; the ranks only "
            "compare their calls");
  EXPECT_EQ(explain(Collective::kBarrier, 0, machine(2)),
            "barrier of 2 ranks on one host: flags in shared memory, nothing to choose");
}

struct ExpectedInterHost {
  schedule::Collective collective;
  size_t hosts;
  size_t rails;
  size_t bytes;
  const char* schedule;
  size_t slice_kb;
  bool by_leader;
};

using Across = schedule::Collective;

// clang-format off
constexpr ExpectedInterHost kInterHostPlans[] = {
    // collective          hosts  rails    bytes    schedule            slice KiB  by leader
    {Across::kAllReduce,       2,     2,        8,  "pair",                   504,  true},
    {Across::kAllReduce,       2,     2,   16 * K,  "pair",                   504,  true},
    {Across::kAllReduce,       2,     2, 16*K + 1,  "pair",                  1008,  false},
    {Across::kAllReduce,       2,     2,  256 * K,  "pair",                  1008,  false},
    {Across::kAllReduce,       2,     2, 256*K + 1, "ring",                  2016,  false},
    {Across::kAllReduce,       2,     8,   64 * M,  "ring",                  8064,  false},
    {Across::kAllReduce,       3,     1,   16 * K,  "recursive_doubling",     504,  true},
    {Across::kAllReduce,       8,     4,   64 * M,  "ring",                 16128,  false},
    {Across::kAllReduce,       8,     1, 288*K - 1, "halving_doubling",      4032,  false},
    {Across::kAllReduce,       8,     1,  288 * K,  "ring",                  4032,  false},
    {Across::kAllReduce,      12,     1, 168*K - 1, "halving_doubling",      4032,  false},
    {Across::kAllReduce,      12,     1,  168 * K,  "ring",                  4032,  false},
    {Across::kAllReduce,    1024,     4,   64 * M,  "halving_doubling",     16128,  false},
    {Across::kAllReduce,    1024,     4, 1024 * M,  "halving_doubling",     16128,  false},
    {Across::kAllReduce,     300,     1,   64 * M,  "ring",                  4032,  false},
    {Across::kAllReduce,     400,     1, 1024 * M,  "halving_doubling",      4032,  false},
    {Across::kAllReduce,    1000,     8,        8,  "recursive_doubling",     504,  true},
    {Across::kReduceScatter,   2,     2,   16 * K,  "halving",                504,  false},
    {Across::kReduceScatter,   2,     2,    1 * M,  "ring",                   504,  false},
    {Across::kReduceScatter,  64,     2,    1 * M,  "halving",                504,  false},
    {Across::kReduceScatter,  48,     2,    1 * M,  "ring",                   504,  false},
    {Across::kAllGather,      16,     2,   16 * K,  "direct",                 504,  false},
    {Across::kAllGather,      16,     2, 16*K + 1,  "ring",                   504,  false},
    {Across::kAllGather,      17,     2,   16 * K,  "bruck",                  504,  false},
    {Across::kAllGather,       5,     2,    1 * M,  "ring",                   504,  false},
    {Across::kBroadcast,       5,     2,   64 * K,  "binomial",               504,  true},
    {Across::kBroadcast,       2,     2, 64*K + 1,  "chain",                  504,  true},
    {Across::kBroadcast,       4,     2, 2016 * K,  "chain",                  504,  true},
    {Across::kBroadcast,       4,     2, 2016*K - 1, "scatter_all_gather",    504,  true},
    {Across::kBroadcast,       4,     2,  144 * K,  "scatter_all_gather",     504,  true},
    {Across::kBroadcast,       4,     2, 144*K - 1, "binomial",               504,  true},
    {Across::kBroadcast,      64,     2,  360 * K,  "scatter_all_gather",     504,  true},
    {Across::kBroadcast,      64,     2, 360*K - 1, "binomial",               504,  true},
    {Across::kBroadcast,      50,     2,   25 * M,  "chain",                  504,  true},
    {Across::kBroadcast,      50,     2,    1 * M,  "scatter_all_gather",     504,  true},
    {Across::kReduce,         50,     2,   64 * K,  "binomial",               504,  true},
    {Across::kReduce,         50,     2,   25 * M,  "chain",                  504,  true},
    {Across::kReduce,         50,     2,    2 * M,  "ring_gather",           4032,  true},
    {Across::kReduce,         50,     2,    1 * M,  "halving_gather",        4032,  true},
    {Across::kGather,         50,     2,    1 * M,  "linear",                 504,  false},
    {Across::kScatter,        50,     2,    1 * M,  "linear",                 504,  false},
    {Across::kAllToAll,       50,     2,    1 * M,  "pairwise",               504,  false},
    {Across::kBarrier,        50,     2,        0,  "dissemination",          504,  true},
};
// clang-format on

std::string row_between(const ExpectedInterHost& e, const char* schedule, size_t slice_kb, bool by_leader) {
  char text[160];
  std::snprintf(text, sizeof text, "%-15s %4zu hosts %2zu rails %9zu B  %-20s slices of %6zu KiB%s", name(e.collective),
                e.hosts, e.rails, e.bytes, schedule, slice_kb, by_leader ? ", one rank of each host" : "");
  return text;
}

TEST(PlanBetween, IsThisTable) {
  for (const ExpectedInterHost& e : kInterHostPlans) {
    PlanFacts facts = machine(e.rails);
    facts.hosts = e.hosts;
    facts.rails = e.rails;
    facts.world = e.hosts * e.rails;
    const InterHostPlan inter_host = plan_between(e.collective, e.bytes, facts);
    ASSERT_NE(inter_host.row, nullptr);
    EXPECT_EQ(row_between(e, inter_host.row->name, inter_host.slice >> 10, inter_host.by_leader),
              row_between(e, e.schedule, e.slice_kb, e.by_leader));
  }
}

/// The explanation of a group over hosts matches its plan: the schedule and its reason, the medium, the slices, and
/// the steps inside a host.
TEST(PlanBetween, ExplainsItself) {
  struct Row {
    Collective collective;
    size_t ranks, hosts, bytes;
    const char* text;
  };
  const Row kRows[] = {
      {Collective::kAllReduce, 2, 2, 8,
       "all_reduce of 8 bytes a rank, 4 ranks on 2 hosts, 2 on each: inside a host reduce_one_shot, between hosts pair "
       "(small, two hosts: one exchange) by one rank of each host, inside a host publish_one_shot"},
      {Collective::kAllReduce, 2, 2, 64 * M,
       "all_reduce of 67108864 bytes a rank, 4 ranks on 2 hosts, 2 on each: inside a host reduce_scatter_pipelined, "
       "between hosts ring (large, few hosts: every byte is reduced once) on 2 rails (ranks of each host), in 33 "
       "slices "
       "of 2016 KiB that overlap with the steps inside, inside a host publish_pipelined"},
      {Collective::kAllReduce, 1, 9, 64 * K,
       "all_reduce of 65536 bytes a rank, 9 ranks on 9 hosts, 1 on each: between hosts halving_doubling (short for its "
       "number of hosts: the fewest steps) on 1 rail"},
      {Collective::kReduceScatter, 2, 2, 4 * M,
       "reduce_scatter of 4194304 bytes a rank, 4 ranks on 2 hosts, 2 on each: inside a host reduce_scatter_pipelined, "
       "between hosts ring (large, few hosts: every byte is reduced once) on 2 rails (ranks of each host), in 3 slices "
       "of 504 KiB that overlap with the steps inside"},
      {Collective::kBroadcast, 2, 2, 100,
       "broadcast of 100 bytes a rank, 4 ranks on 2 hosts, 2 on each: between hosts binomial (small: the fewest steps) "
       "by one rank of each host, inside a host publish_one_shot"},
      {Collective::kAllToAll, 2, 2, 100,
       "all_to_all of 100 bytes a rank, 4 ranks on 2 hosts, 2 on each: between hosts pairwise (every block goes "
       "directly to its destination), inside a host exchange"},
      {Collective::kBarrier, 2, 2, 0,
       "barrier of 4 ranks on 2 hosts, 2 on each: inside a host barrier, between hosts dissemination "
       "(the fewest steps) by one rank of each host, inside a host barrier"},
  };
  for (const Row& row : kRows) {
    PlanFacts facts = machine(row.ranks);
    facts.hosts = row.hosts;
    facts.rails = row.ranks;
    facts.world = row.ranks * row.hosts;
    EXPECT_EQ(explain(row.collective, row.bytes, facts), row.text);
  }
  PlanFacts uneven = machine(3);
  uneven.hosts = 2;
  uneven.rails = 2;
  uneven.world = 5;
  const std::string text = explain(Collective::kAllReduce, 1 * M, uneven);
  EXPECT_NE(text.find("5 ranks on 2 hosts, 3 on the largest: "), std::string::npos) << text;
  EXPECT_NE(text.find(" on 2 rails"), std::string::npos) << text;
}

/// The steps inside a host have a name for every collective between hosts.
TEST(PlanBetween, NamesWhatGoesOnInsideForEveryQuestion) {
  for (int c = int(Across::kAllReduce); c <= int(Across::kBarrier); ++c) {
    for (const size_t hosts : {2, 9}) {
      for (const size_t bytes : {size_t(8), 1 * M}) {
        PlanFacts facts = machine(2);
        facts.hosts = hosts;
        const InterHostPlan inter_host = plan_between(Across(c), bytes, facts);
        EXPECT_TRUE(inter_host.before != Collective::kNone || inter_host.after != Collective::kNone) << name(Across(c));
      }
    }
  }
}

/// Blocks of different lengths take a schedule that does not depend on lengths.
TEST(PlanBetween, BlocksOfAnySizeTakeAScheduleThatServesThem) {
  PlanFacts facts = machine(2);
  facts.hosts = 17;
  facts.rails = 2;
  EXPECT_STREQ(plan_between(Across::kAllGather, 100, facts, nvx::Blocks::kAlike).row->name, "bruck");
  EXPECT_STREQ(plan_between(Across::kAllGather, 100, facts, nvx::Blocks::kOfAnySize).row->name, "ring");
}

/// Every collective has a schedule between any number of hosts, with slices that are not empty, and a reason.
TEST(PlanBetween, ServesEveryQuestion) {
  for (int c = int(Across::kAllReduce); c <= int(Across::kBarrier); ++c) {
    for (const size_t hosts : {1, 2, 3, 8, 9, 10'000}) {
      for (const size_t rails : {1, 2, 8}) {
        PlanFacts facts = machine(rails);
        facts.hosts = hosts;
        facts.rails = rails;
        for (size_t bytes = 0; bytes < (size_t(1) << 40); bytes = bytes * 9 + 1) {
          const InterHostPlan inter_host = plan_between(Across(c), bytes, facts);
          ASSERT_NE(inter_host.row, nullptr);
          EXPECT_EQ(inter_host.row->collective, Across(c));
          EXPECT_GE(inter_host.slice, 64 * K);
          EXPECT_NE(std::string(inter_host.why), "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace nvx::test
