// Simulations against the traffic of the schedules and against closed forms. bench/simulation.py compares them with
// real runs.

#include "group/plan/simulate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "group/plan/estimate.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::Collective;

constexpr double kRate = 1e9, kLatency = 10e-6;
constexpr Fabric kFabric{.inside = 100e9, .between = kRate, .latency = kLatency};

PlanFacts alike_hosts(size_t hosts, size_t ranks = 1) {
  return {.ranks = ranks, .hosts = hosts, .rails = ranks, .world = ranks * hosts, .cores = ranks};
}

Simulation on(Collective collective, size_t bytes, const PlanFacts& facts, const Fabric& fabric = kFabric) {
  const auto s = nvx::simulate(collective, bytes, facts, fabric);
  EXPECT_TRUE(s.has_value());
  return s.value_or(Simulation{});
}

TEST(Simulate, ARingMovesTwiceAllButOnePart) {
  for (const size_t hosts : {2, 3, 4, 8}) {
    const size_t bytes = 3 * 64 * 5 * 7 * K;
    const Simulation s = on(Collective::kAllReduce, bytes, alike_hosts(hosts));
    const double moved = 2 * double(bytes) * double(hosts - 1) / double(hosts);
    EXPECT_NEAR(double(s.between_bytes), moved, 64);
    EXPECT_NEAR(double(s.all_bytes), moved * double(hosts), 512);
    EXPECT_NEAR(s.between_seconds, moved / kRate, 1e-6);
    EXPECT_GT(s.seconds, s.between_seconds);
    EXPECT_LT(s.seconds, s.between_seconds * 1.1) << hosts;
  }
}

/// All that a slice's schedule sends to other hosts, step by step of every place.
size_t sent_in_slice(Collective collective, size_t bytes, const PlanFacts& facts) {
  const InterHostPlan plan = plan_between(across(collective), bytes, facts);
  std::vector<schedule::Block> blocks;
  const RunBetween run = run_between(collective, bytes, plan, facts, blocks);
  EXPECT_LE(run.slices, 1);
  size_t sum = 0;
  for (int place = 0; place < run.layout.size; ++place) {
    for (uint64_t i = 0; i < plan.row->steps(run.layout, place); ++i) {
      const schedule::Step step = plan.row->at(run.layout, place, i);
      if (step.send_to >= 0 && step.send_to / run.host_ranks != place / run.host_ranks) sum += step.send.bytes;
    }
  }
  return sum * (plan.by_leader || run.host_ranks > 1 ? 1 : facts.rails);
}

TEST(Simulate, MovesWhatTheSchedulesMove) {
  for (int c = int(Collective::kAllReduce); c <= int(Collective::kBarrier); ++c) {
    for (const size_t hosts : {2, 3, 4, 8, 13, 32}) {
      for (const size_t ranks : {1, 2, 3}) {
        for (const size_t each : {size_t(64), 1 * K}) {
          const PlanFacts facts = alike_hosts(hosts, ranks);
          const size_t bytes = c == int(Collective::kBarrier) ? 0 : each * facts.world;
          const Simulation s = on(Collective(c), bytes, facts);
          EXPECT_EQ(s.all_bytes, sent_in_slice(Collective(c), bytes, facts))
              << name(Collective(c)) << hosts << "x" << ranks;
          EXPECT_GE(s.all_bytes, s.between_bytes);
          EXPECT_GE(s.seconds * 1.000001, s.between_seconds + kLatency);
          EXPECT_TRUE(std::isfinite(s.seconds));
        }
      }
    }
  }
}

TEST(Simulate, TakesTheTimeOfTheFormulas) {
  const auto seconds = [](Collective collective, size_t bytes, size_t hosts) {
    return on(collective, bytes, alike_hosts(hosts)).seconds;
  };
  EXPECT_NEAR(seconds(Collective::kBarrier, 0, 1000), 10 * (kLatency + 1 / kRate), 1e-9);
  const double whole = double(4 * M) / kRate;
  EXPECT_NEAR(seconds(Collective::kAllToAll, 4 * M, 64), whole * 63 / 64 + kLatency, 1e-6);
  EXPECT_NEAR(seconds(Collective::kGather, 4 * M, 64), whole * 63 + kLatency, 1e-6) << "one card receives all";
  EXPECT_NEAR(seconds(Collective::kScatter, 4 * M, 64), whole * 63 / 64 + kLatency, 1e-6);
  EXPECT_NEAR(seconds(Collective::kAllGather, 128 * K, 64), 63 * (double(128 * K) / kRate + kLatency), 1e-6);
  // 6 rounds of the whole, each reduced at 3 reads and writes a byte
  const double round = double(8 * K) / kRate + kLatency + 3 * double(8 * K) / kFabric.inside;
  EXPECT_NEAR(seconds(Collective::kAllReduce, 8 * K, 64), 6 * round, 1e-9);
}

TEST(Simulate, SimulatesSomeOfManySlices) {
  const auto seconds = [](size_t bytes, size_t hosts) {
    return on(Collective::kBroadcast, bytes, alike_hosts(hosts)).seconds;
  };
  const double all_links = double(64 * M) / kRate;
  EXPECT_NEAR(seconds(64 * M, 8), all_links * (1 + 6.0 * 504 * K / double(64 * M)), all_links / 100) << "a chain";
  const double many = seconds(240 * M, 500);
  EXPECT_NEAR(many, 2 * seconds(120 * M, 500), many / 50) << "a scatter and an all-gather";
}

TEST(Simulate, SlicesOfBlocksThatDivideUnevenly) {
  const double even = on(Collective::kReduceScatter, 63 * M, alike_hosts(3)).seconds;
  EXPECT_NEAR(on(Collective::kReduceScatter, 64 * M, alike_hosts(3)).seconds, even * 64 / 63, even / 50);
}

TEST(Simulate, ARankReducesOneMessageAfterAnother) {
  constexpr size_t kBytes = 64 * M;
  const Simulation s = on(Collective::kAllReduce, kBytes, alike_hosts(2), {.inside = 1e9, .between = 1e15});
  EXPECT_GE(s.seconds, 3 * double(kBytes) / 2 / 1e9);
  EXPECT_NEAR(s.inside_seconds, 3 * double(kBytes) / 2 / 1e9, 1e-3);
}

/// Five slices run at once, so where latency decides, the time grows by turns of five.
TEST(Simulate, WholeTurnsOfSlicesAreExtrapolated) {
  Fabric slow = kFabric;
  slow.latency = 0.1;
  const auto seconds = [&](size_t slices) {
    return on(Collective::kAllGather, slices * 504 * K, alike_hosts(5000), slow).seconds;
  };
  const double turn = seconds(5);
  EXPECT_NEAR(turn, 4999 * slow.latency, turn / 50);
  EXPECT_NEAR(seconds(1000), 200 * turn, 4 * turn);
}

TEST(Simulate, RanksShareTheCardsOfTheirHost) {
  for (const Collective collective : {Collective::kAllReduce, Collective::kAllToAll, Collective::kAllGather}) {
    const PlanFacts facts = alike_hosts(4, 8);
    const Simulation one = on(collective, 64 * M, facts);
    Fabric fabric = kFabric;
    fabric.cards = 8;
    const Simulation eight = on(collective, 64 * M, facts, fabric);
    EXPECT_EQ(one.all_bytes, eight.all_bytes);
    EXPECT_NEAR(one.between_seconds, 8 * eight.between_seconds, one.between_seconds / 1000);
    EXPECT_LT(eight.seconds * 4, one.seconds) << name(collective);
  }
}

TEST(Simulate, TenThousandRanks) {
  for (int c = int(Collective::kAllReduce); c <= int(Collective::kBarrier); ++c) {
    const Simulation s = on(Collective(c), c == int(Collective::kBarrier) ? 0 : 64 * K, alike_hosts(10000));
    EXPECT_GT(s.seconds, kLatency) << name(Collective(c));
  }
  EXPECT_FALSE(nvx::simulate(Collective::kBroadcast, 256 * M, alike_hosts(100000), kFabric))
      << "refused, not simulated for ever";
}

}  // namespace
}  // namespace nvx::test
