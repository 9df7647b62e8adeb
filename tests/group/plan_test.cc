// What is chosen, as a table: a changed threshold is a changed line here.

#include "group/plan.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace nvx {
namespace {

using kernel::Algorithm;
using kernel::Collective;

PlanFacts machine(size_t ranks, size_t l3_mb = 32) {
  return {.ranks = ranks, .cores = 2, .l2_bytes = 1 << 20, .l3_bytes = l3_mb << 20};
}

struct Expected {
  Collective collective;
  size_t ranks;
  size_t bytes;
  const char* algorithm;
  size_t lease_kb;
};

constexpr size_t K = 1 << 10, M = 1 << 20;

// clang-format off
constexpr Expected kTable[] = {
    // collective              ranks   bytes     algorithm                    lease KiB
    {Collective::kAllReduce,       2,       0,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2,       8,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2,  32 * K,  "reduce_one_shot",               0},
    {Collective::kAllReduce,       2, 32*K+1,   "reduce_pipelined",            256},
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
  for (const Expected& e : kTable) {
    const Choice choice = plan(e.collective, e.bytes, machine(e.ranks));
    EXPECT_EQ(row(e.collective, e.ranks, e.bytes, kernel::name(choice.algorithm), choice.lease_bytes >> 10),
              row(e.collective, e.ranks, e.bytes, e.algorithm, e.lease_kb));
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
  facts.one_shot_bytes = 100;
  EXPECT_EQ(plan(Collective::kAllReduce, 100, facts).algorithm, Algorithm::kReduceOneShot);
  EXPECT_EQ(plan(Collective::kAllReduce, 101, facts).algorithm, Algorithm::kReducePipelined);
  facts.lease_bytes = 512 * K;
  EXPECT_EQ(plan(Collective::kAllReduce, 64 * M, facts).lease_bytes, 512 * K);
}

/// Whatever fits the limit fits the slot, and every lease is at least the smallest: for any machine.
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
  for (const char* part : {"all_reduce", "1048576 bytes", "2 ranks", "reduce_pipelined", "NVX_ALGO", "NVX_LEASE_KB"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace nvx
