// Groups end to end: ranks, as threads and as processes, connect through a store and run every collective with the
// algorithm that the plan chooses.

#include "group/group.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "support/groups.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

std::vector<Spec> specs_at(const std::vector<size_t>& sizes, int ranks) {
  std::vector<Spec> specs;
  uint64_t round = 0;
  for (const size_t n : sizes) {
    for (const Collective collective : kCollectives) {
      Spec spec{.collective = collective, .counts = std::vector<size_t>(size_t(ranks), n), .round = ++round};
      if (collective >= Collective::kAllToAll || collective == Collective::kAllGather) spec.counts.back() += round % 5;
      if (is_rooted(collective)) spec.root = int(round) % ranks;
      spec.shift = round % 3;
      specs.push_back(spec);
    }
  }
  return specs;
}

class Groups : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Groups, testing::Values(1, 2, 3, 5));

TEST_P(Groups, OfThreadsRunEveryCollective) {
  MemoryStore store;
  const auto specs = specs_at({0, 1, 1000, as_fast(100'000, 5'000), 20'001}, GetParam());
  as_threads(GetParam(), [&](int rank) {
    Group group(store, options("threads", rank, GetParam(), uint32_t(-20)));
    for (const Spec& spec : specs) ASSERT_EQ(perform(group, spec), "");
    EXPECT_EQ(group.sequence(), specs.size());
    ASSERT_TRUE(barrier(group).ok());  // no rank leaves while others still run
  });
}

TEST_P(Groups, OfProcessesRunEveryCollective) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto specs = specs_at({0, 1, 1000, 20'001, as_fast(100'000, 5'000)}, GetParam());
  all_end_well(GetParam(), [&](int rank) {
    Group group(store, options("processes", rank, GetParam(), (1u << 31) - 20));
    for (const Spec& spec : specs) ASSERT_EQ(perform(group, spec), "");
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// Many groups over the same ranks, used in an order that differs by rank: no group waits for another.
TEST(Group, ManyAtOnceInAnyOrder) {
  constexpr int kRanks = 2, kGroups = 12;
  std::vector<MemoryStore> stores(kGroups);
  as_threads(kRanks, [&](int rank) {
    std::vector<std::unique_ptr<Group>> groups;
    for (int g = 0; g < kGroups; ++g)
      groups.push_back(std::make_unique<Group>(stores[size_t(g)], options("g", rank, kRanks)));
    std::vector<std::thread> threads;
    for (int i = 0; i < kGroups; ++i) {
      const int g = rank == 0 ? i : kGroups - 1 - i;
      threads.emplace_back([&, g] {
        for (uint64_t round = 0; round < 6; ++round) {
          const size_t n = round % 2 ? as_fast(100'000, 20'000) : 10;
          EXPECT_EQ(
              perform(*groups[size_t(g)], {.collective = Collective::kAllReduce, .counts = {n, n}, .round = round}),
              "");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& group : groups) EXPECT_TRUE(barrier(*group).ok());
  });
}

/// Several threads of a rank may call one group. They make the same calls on all ranks, so any order is right.
TEST(Group, ThreadsOfARankTakeTurns) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("turns", rank, 2));
    const auto work = [&] {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {5000, 5000}}), "");
      }
    };
    std::thread second(work);
    work();
    second.join();
  });
}

TEST(Group, AnUndefinedReductionIsRefusedAndTheGroupStaysUsable) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("refused", rank, 2));
    Operation o;
    o.collective = Collective::kAllReduce;
    o.dtype = DType::kF32;
    o.op = ReduceOp::kBand;
    o.send = Pieces(2);
    o.recv = Pieces(2);
    const Status status = group.execute(o);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kInvalid);
    EXPECT_NE(status.what().find("band is not defined for f32"), std::string::npos) << status.what();
    EXPECT_TRUE(barrier(group).ok());
  });
}

TEST(Group, ReleasesAllItsMemory) {
  const std::shared_ptr<ShmRegistry> here = ShmRegistry::instance();
  const size_t before = here->arena().used();
  for (int round = 0; round < 3; ++round) {
    MemoryStore store;
    as_threads(2, [&](int rank) {
      Group group(store, options("memory", rank, 2));
      ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {as_fast(1'000'000, 200'000), 0}}), "");
      Bytes bytes(100'000);
      const auto request = message(1 - rank, 7, bytes.data(), bytes.size());
      ASSERT_TRUE((rank == 0 ? send_now(group, request) : receive_now(group, request)).ok());
      ASSERT_TRUE(barrier(group).ok());
    });
    here->arena().free(here->arena().allocate(1));  // `allocate` collects buried memory
    EXPECT_EQ(here->arena().used(), before);
  }
}

/// The staging of all groups together stays within its bound, and each group that requests one gets a lease.
TEST(Group, ManyGroupsShareTheStaging) {
  constexpr size_t kCount = 1'500'000;  // each would take 8 MiB
  const size_t how_many = as_fast(24, 8);
  std::vector<MemoryStore> stores(how_many);
  const std::shared_ptr<ShmRegistry> here = ShmRegistry::instance();
  const size_t pads = how_many * 2 * (kernel::PadLayout(2).bytes() + 64 * 1024);
  as_threads(2, [&](int rank) {
    std::vector<std::unique_ptr<Group>> groups;
    for (MemoryStore& store : stores) groups.push_back(std::make_unique<Group>(store, options("share", rank, 2)));
    std::vector<float> data(kCount, 1);
    for (auto& group : groups) {
      Operation o;
      o.collective = Collective::kAllReduce;
      o.dtype = DType::kF32;
      o.in = o.out = reinterpret_cast<std::byte*>(data.data());
      o.count = kCount;
      o.send = Pieces(2);
      o.recv = Pieces(2);
      const Status status = group->execute(o);
      ASSERT_TRUE(status.ok()) << status.what();
      EXPECT_LE(here->arena().used(), (size_t(64) << 20) + 2 * how_many * LeasePool::kSmallest + pads);
    }
    EXPECT_TRUE(data == std::vector<float>(kCount, float(1 << how_many)));
    for (auto& group : groups) ASSERT_TRUE(barrier(*group).ok());
  });
}

/// Consecutive operations stage in different parts of the lease and come back to the first, if ranks do not share
/// cores. A large operation before them, which leases more, changes nothing.
TEST(Group, StagingRotates) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("rotate", rank, 2));
    constexpr size_t kPart = 72 << 10;  // 70 KiB and a line for each rank, in whole pages
    const size_t rotates = rotation(group.plan_facts());
    ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {2'000'000, 0}}), "");
    std::set<uint64_t> places;
    for (size_t call = 0; call < rotates / kPart + 10; ++call) {
      ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {(70 << 10) / 4, 0}}), "");
      for (uint32_t e = 0; e < kernel::kEpochs && call >= kernel::kEpochs; ++e)
        places.insert(group.core().members.own_pad().arrival(e).lease_offset);
    }
    EXPECT_EQ(places.size(), std::max<size_t>(1, rotates / kPart));
  });
}

TEST(Group, OnlyTheRootOfABroadcastLeasesStaging) {
  MemoryStore store;
  const std::shared_ptr<ShmRegistry> here = ShmRegistry::instance();
  as_threads(3, [&](int rank) {
    Group group(store, options("root", rank, 3));
    std::vector<size_t> left{here->leases().unleased()};
    ASSERT_TRUE(barrier(group).ok());
    for (const int root : {0, 1}) {
      ASSERT_EQ(perform(group, {.collective = Collective::kBroadcast, .root = root, .counts = {300'000, 0, 0}}), "");
      ASSERT_TRUE(barrier(group).ok());
      left.push_back(here->leases().unleased());
      ASSERT_TRUE(barrier(group).ok());
    }
    EXPECT_LT(left[1], left[0]);
    EXPECT_EQ(left[0] - left[1], left[1] - left[2]);
  });
}

/// The timeouts of messages and of collectives of one group do not combine into a deadlock.
TEST(Group, CollectivesAndMessagesGoApart) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("apart", rank, 2));
    Bytes out(300'000, std::byte(rank + 1)), in(300'000);
    const auto receive = message(1 - rank, 1, in.data(), in.size());
    group.mailbox().receive(receive, Runner::kPool);
    ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {50'000, 0}}), "");
    const auto send = message(1 - rank, 1, out.data(), out.size());
    group.mailbox().send(send, Runner::kPool);
    ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .counts = {50'000, 0}}), "");
    ASSERT_TRUE(group.mailbox().wait(*send).ok());
    ASSERT_TRUE(group.mailbox().wait(*receive).ok());
    EXPECT_EQ(in[0], std::byte(2 - rank));
    EXPECT_TRUE(in == Bytes(300'000, std::byte(2 - rank)));
    ASSERT_TRUE(barrier(group).ok());
  });
}

}  // namespace
}  // namespace nvx::test
