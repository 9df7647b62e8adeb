// The terms of estimates. tests/bench/test_estimates.py compares estimates with measured times.

#include "group/plan/estimate.h"

#include <gtest/gtest.h>

#include "group/device_explain.h"
#include "support/simulate.h"
#include "support/sizes.h"
#include "support/traffic.h"

namespace nvx::test {
namespace {

using kernel::Collective;

PlanFacts hosts_of(size_t ranks, size_t hosts = 1) {
  return {.ranks = ranks, .hosts = hosts, .rails = ranks, .world = ranks * hosts, .cores = 2};
}

const Way& running(const std::vector<Way>& ways) {
  return *std::find_if(ways.begin(), ways.end(), [](const Way& way) { return way.runs; });
}

TEST(Estimate, MovesWhatTheSchedulesMove) {
  for (const schedule::Row& row : schedule::catalog()) {
    for (const int size : {2, 3, 4, 8, 13}) {
      const test::Shape shape = test::large_shape(row.collective, size, 1 * K, 4);
      if (!row.legal(shape.layout(0))) continue;
      const std::string text = std::string(name(row.collective)) + " " + row.name + " " + std::to_string(size);
      const Moved moved = moved_by(row, shape.layout(0));
      const test::Simulated simulated = test::simulate(row, shape);
      ASSERT_EQ(simulated.error, "") << text;
      EXPECT_GE(moved.bytes * 5, simulated.most_sent * 4) << text;
      // A rank that receives from several ranks may receive more than any rank sends.
      const size_t got = test::most_messages(row, size) * moved.largest;
      EXPECT_LE(moved.bytes, std::max(test::most_sent(row, shape.layout(0)), got)) << text;
      EXPECT_LE(moved.messages, test::most_messages(row, size)) << text;
      EXPECT_GE(moved.messages * row.guarantee.depth(size), 1u) << text;
      EXPECT_LE(moved.largest, moved.bytes) << text;
    }
  }
}

TEST(Estimate, LeavesOutWhatStaysInsideAHost) {
  const schedule::Row* pairwise = schedule::find(schedule::Collective::kAllToAll, "pairwise");
  const test::Shape shape = test::large_shape(pairwise->collective, 8, 1 * K, 4);
  EXPECT_EQ(moved_by(*pairwise, shape.layout(0)).bytes, 7 * K);
  EXPECT_EQ(moved_by(*pairwise, shape.layout(0), 2).bytes, 6 * K);
  EXPECT_EQ(moved_by(*pairwise, shape.layout(0), 8).bytes, 0u);
}

/// An algorithm never takes less time for more bytes. Where the plan switches to one that moves less, the estimate may
/// drop a little.
TEST(Estimate, GrowsWithTheSize) {
  for (int c = int(Collective::kAllReduce); c < int(Collective::kBarrier); ++c) {
    for (const auto& [ranks, hosts] : {std::pair<size_t, size_t>{2, 1}, {4, 1}, {8, 1}, {1, 2}, {4, 2}, {8, 16}}) {
      double before = 0;
      for (size_t bytes = 1 * K; bytes <= 256 * M; bytes *= 2) {
        const auto ways = ways_of(Collective(c), bytes, hosts_of(ranks, hosts), tcp());
        const Way& way = running(ways);
        EXPECT_GT(way.estimate.seconds, before * 0.8)
            << name(Collective(c)) << " " << ranks << "x" << hosts << " " << bytes << " " << way.what;
        EXPECT_FALSE(way.estimate.basis.empty());
        before = std::max(before, way.estimate.seconds);
      }
      EXPECT_GT(before, 1e-3);
    }
  }
}

TEST(Estimate, TakesWhatTheMediumTakes) {
  const auto seconds = [](size_t bytes, const Medium& medium) {
    const auto ways = ways_of(Collective::kAllReduce, bytes, hosts_of(1, 2), medium);
    return running(ways).estimate.seconds;
  };
  EXPECT_LT(seconds(8, rdma(25)), seconds(8, tcp()));
  EXPECT_LT(seconds(64 * M, rdma(25)), seconds(64 * M, rdma(12.5)));
  EXPECT_NEAR(seconds(64 * M, rdma(12.5)), 64 * M / 10e9, 1e-3) << "a ring of two sends all there is";
  EXPECT_EQ(rdma(25).basis.find("not measured"), 0u);
}

TEST(Estimate, ALinkOfTheHostIsNoFasterForMoreRanks) {
  const auto proxy = [](size_t ranks, const Medium& medium) {
    return explain_on_device({Collective::kAllReduce, 64 * M, hosts_of(ranks, 2), true, "", {}, medium})[1].estimate;
  };
  EXPECT_NEAR(proxy(32, tcp()).seconds, proxy(2, tcp()).seconds, 0.3 * proxy(2, tcp()).seconds);
  EXPECT_LT(proxy(8, rdma(12.5)).seconds * 2, proxy(2, rdma(12.5)).seconds) << "each rail has a port";
}

TEST(Estimate, NamesTheFasterAlgorithmInSharedMemory) {
  const auto small = ways_of(Collective::kAllReduce, 8 * K, hosts_of(2), tcp());
  ASSERT_EQ(small.size(), 2u);
  EXPECT_TRUE(small[0].runs);
  EXPECT_LT(small[0].estimate.seconds, small[1].estimate.seconds);
  const auto large = ways_of(Collective::kAllReduce, 1 * M, hosts_of(2), tcp());
  EXPECT_EQ(large[0].estimate.seconds, 0) << "no slot holds it";
  EXPECT_NE(large[0].why.find("65536"), std::string::npos);
  EXPECT_TRUE(large[1].runs);
  EXPECT_GT(large[1].estimate.bytes, 4 * M) << "staged, reduced, fetched";
}

GpuTopology joined(int lanes) {
  GpuTopology topology;
  topology.gpus.resize(2);
  GpuPair pair;
  pair.b = 1;
  pair.lanes = lanes;
  pair.expected_gb_s = lanes ? lanes * 25 : 31.5;
  topology.pairs = {pair};
  return topology;
}

TEST(Estimate, OfDevicesGoesByTheSlowestLinkAndNamesIt) {
  const auto ways = [](const DeviceLink& link, size_t bytes) {
    return explain_on_device({Collective::kAllReduce, bytes, hosts_of(8), /*has_kernels=*/true, "", link});
  };
  const auto nvlink = ways(slowest_link(joined(18)), 64 * M), pcie = ways(slowest_link(joined(0)), 64 * M);
  EXPECT_LT(running(nvlink).estimate.seconds * 5, running(pcie).estimate.seconds);
  EXPECT_NE(running(nvlink).estimate.basis.find("not measured on a device"), std::string::npos);
  EXPECT_EQ(running(nvlink).estimate.basis.find("predicted for reduce_chunks: "), 0u);
  EXPECT_NE(running(nvlink).estimate.basis.find(" rounds with a fence each, "), std::string::npos);
  EXPECT_NE(running(nvlink).estimate.basis.find(" KiB in flight in each of 24 blocks"), std::string::npos);
  EXPECT_EQ(nvlink.back().estimate.basis.find("predicted"), 0u) << "through host memory";
  EXPECT_EQ(nvlink.front().estimate.basis.find("predicted"), 0u) << "NCCL";
  EXPECT_NE(running(nvlink).estimate.basis.find("NV18, the slowest pair here"), std::string::npos);
  EXPECT_EQ(running(nvlink).estimate.bytes, 2 * 7 * 64 * M / 8);
  EXPECT_GT(nvlink.back().estimate.seconds, running(nvlink).estimate.seconds) << "through host memory";
  EXPECT_GT(nvlink.front().estimate.seconds, 0) << "NCCL";
  const auto small = ways(slowest_link({}), 1 * K);
  EXPECT_NE(running(small).estimate.basis.find("no GPU here"), std::string::npos);
  EXPECT_LT(running(small).estimate.seconds, 20e-6);
  GpuTopology one;
  one.gpus.resize(1);
  EXPECT_EQ(ways(slowest_link(joined(18)), 64 * M)[1].estimate.seconds, 0) << "packets do not hold it";
  EXPECT_EQ(slowest_link(one).kind, DeviceLink::Kind::kOneGpu);
}

TEST(Estimate, OfDevicesOverHostsHoldsAProxyAgainstHostMemory) {
  const auto ways = [](Collective collective, size_t bytes, const Medium& medium, bool has_kernels = true) {
    return explain_on_device({collective, bytes, hosts_of(8, 2), has_kernels, "", slowest_link(joined(18)), medium});
  };
  for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
    double before = 0;
    for (const size_t bytes : {16 * M, 64 * M, 256 * M}) {
      const auto found = ways(c, bytes, rdma(50));
      ASSERT_EQ(found.size(), 4u);
      const Estimate &proxy = found[1].estimate, &host = found[2].estimate;
      EXPECT_TRUE(found[1].runs) << found[1].why;
      EXPECT_GT(proxy.seconds, before);
      EXPECT_LT(proxy.seconds, host.seconds) << name(c) << " " << bytes;
      EXPECT_NE(proxy.basis.find("between hosts not measured: RDMA"), std::string::npos) << proxy.basis;
      before = proxy.seconds;
    }
  }
  const double messenger = 256 * M / 8 / (0.8 * 50e9);  // each rail carries an eighth, once in each direction
  const double proxy = ways(Collective::kAllReduce, 256 * M, rdma(50))[1].estimate.seconds;
  EXPECT_GT(proxy, messenger);
  EXPECT_LT(proxy, 4 * messenger) << "the stages overlap";
  EXPECT_LT(proxy, ways(Collective::kAllReduce, 256 * M, tcp())[1].estimate.seconds);
  EXPECT_LT(ways(Collective::kAllReduce, 8, tcp())[1].estimate.seconds, 1e-3);
  EXPECT_GT(running(ways(Collective::kAllReduce, 8, tcp())).estimate.seconds, 0);
  EXPECT_GT(ways(Collective::kAllReduce, 64 * M, tcp(), false)[1].estimate.seconds, 0)
      << "what a build with kernels has";
}

}  // namespace
}  // namespace nvx::test
