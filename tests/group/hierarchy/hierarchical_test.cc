// Every collective over ranks of several hosts of every shape. The hosts are simulated by threads, and the network
// between them delays and reorders.

#include "group/hierarchy/hierarchical.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;

/// Integers, because their sums do not depend on the order of addition.
std::vector<Spec> integer_specs_at(const std::vector<size_t>& sizes, int ranks) {
  std::vector<Spec> specs;
  uint64_t round = 0;
  for (const size_t n : sizes) {
    for (const Collective collective : kCollectives) {
      Spec spec{.collective = collective, .dtype = DType::kI32, .counts = std::vector<size_t>(size_t(ranks), n)};
      spec.round = ++round;
      constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kBxor, ReduceOp::kProduct};
      spec.op = kOps[round % std::size(kOps)];
      const bool by_rank = collective >= Collective::kAllToAll || collective == Collective::kAllGather ||
                           collective == Collective::kReduceScatter;
      if (by_rank) spec.counts.back() += round % 5, spec.counts[0] += round % 3;
      if (is_rooted(collective)) spec.root = int(round) % ranks;
      spec.shift = round % 3;
      spec.in_place = round % 2 == 0;
      specs.push_back(spec);
    }
  }
  return specs;
}

struct HostShape {
  const char* name;
  std::vector<int> host_of;
};
void PrintTo(const HostShape& shape, std::ostream* out) { *out << shape.name; }

const HostShape kHostShapes[] = {
    {"two_of_one", {0, 1}},
    {"two_of_two", {0, 0, 1, 1}},
    {"three_of_one", {0, 1, 2}},
    {"five_of_one", {0, 1, 2, 3, 4}},
    {"two_of_two_interleaved", {0, 1, 0, 1}},
    {"three_of_two", {0, 0, 1, 1, 2, 2}},
    {"uneven_two_rails", {0, 0, 0, 0, 0, 1, 1}},
    {"uneven", {0, 0, 0, 1}},
    {"uneven_out_of_order", {2, 0, 1, 0, 2, 0, 1, 0}},
};

/// Under a sanitizer every second one.
std::vector<HostShape> host_shapes() {
  std::vector<HostShape> shapes;
  for (size_t i = 0; i < std::size(kHostShapes); i += as_fast(1, 2)) shapes.push_back(kHostShapes[i]);
  return shapes;
}

class Hierarchical : public testing::TestWithParam<HostShape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Hierarchical, testing::ValuesIn(host_shapes()),
                         [](const auto& shape) { return shape.param.name; });

TEST_P(Hierarchical, RunEveryCollective) {
  Hosts hosts(GetParam().host_of);
  MemoryStore store;
  std::vector<size_t> sizes{0, 1, 7, 3000, as_fast(60'001, 12'001)};
  // Large sizes are left out under a sanitizer and in an emulator, where they take minutes.
  if (!is_sanitized() && !why_no_processes()) sizes.push_back(size_t(1'400'000 / hosts.ranks() / hosts.ranks()));
  const auto specs = integer_specs_at(sizes, hosts.ranks());
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("spread", rank, uint32_t(-20)));
    for (const Spec& spec : specs) ASSERT_EQ(perform(group, spec), "");
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST_P(Hierarchical, RunEveryCollectiveOverASlowAndDisorderlyNet) {
  net::LoopbackNet::Options options;
  options.seed = 7;
  options.segment_bytes = 4 << 10;
  options.place_above = 2 << 10;
  options.faults.most_delay = 5;
  options.faults.reorder = 0.2;
  Hosts hosts(GetParam().host_of, options);
  const auto specs = integer_specs_at({1, 7, 3000, as_fast(20'001, 8'001)}, hosts.ranks());
  hosts.in_group("spread", [&](Group& group, int) {
    for (const Spec& spec : specs) ASSERT_EQ(perform(group, spec), "");
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// Every group that some of six ranks on three hosts can form, in rotated orders: on one and on several hosts, with one
/// and with several ranks a host, and with hosts of the job that have none.
TEST(HierarchicalSubgroups, OfEveryShapeRunEveryCollective) {
  const std::vector<int> host_of{2, 0, 1, 0, 2, 0};
  Hosts hosts(host_of);
  std::vector<std::vector<int>> groups;
  for (unsigned mask = 0; mask < 1u << host_of.size(); mask += unsigned(as_fast(1, 5))) {
    std::vector<int> members;
    for (int r = 0; r < hosts.ranks(); ++r) {
      if (mask >> r & 1) members.push_back(r);
    }
    if (members.size() < 2) continue;
    std::rotate(members.begin(), members.begin() + mask % members.size(), members.end());
    groups.push_back(members);
  }
  std::vector<MemoryStore> stores(groups.size());
  as_threads(hosts.ranks(), [&](int who) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const std::vector<int>& members = groups[g];
      const int size = int(members.size()),
                rank = int(std::find(members.begin(), members.end(), who) - members.begin());
      if (rank == size) continue;
      Group group(stores[g], hosts.options_of("of " + std::to_string(g), rank, size, size_t(who)));
      for (const Spec& spec : integer_specs_at({7, 5000}, size)) ASSERT_EQ(perform(group, spec), "") << "group " << g;
      ASSERT_TRUE(barrier(group).ok());
    }
  });
}

/// Of two zeros of unlike sign, MIN and MAX keep one by its position: the same one on all ranks.
TEST(HierarchicalZeros, AreTheSameOnAllRanks) {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 1}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 2, 3, 4}}) {
    for (const size_t n : {size_t(3), size_t(30'000)}) {
      const size_t ranks = host_of.size();
      Hosts hosts(host_of);
      MemoryStore store;
      std::vector<std::vector<float>> out(ranks, std::vector<float>(n));
      as_threads(int(ranks), [&](int rank) {
        Group group(store, hosts.options("zeros", rank));
        std::vector<float>& mine = out[size_t(rank)];
        for (size_t i = 0; i < n; ++i) mine[i] = (i + size_t(rank)) % 2 ? 0.0f : -0.0f;
        Operation o;
        o.collective = Collective::kAllReduce;
        o.dtype = DType::kF32;
        o.op = ReduceOp::kMax;
        o.count = n;
        o.in = reinterpret_cast<const std::byte*>(mine.data());
        o.out = reinterpret_cast<std::byte*>(mine.data());
        ASSERT_TRUE(group.execute(o).ok());
      });
      for (size_t r = 1; r < ranks; ++r)
        EXPECT_EQ(std::memcmp(out[r].data(), out[0].data(), n * sizeof(float)), 0) << ranks << " ranks, " << n;
    }
  }
}

}  // namespace
}  // namespace nvx::test
