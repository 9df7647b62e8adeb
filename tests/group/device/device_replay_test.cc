// Operations on GPUs that are captured into a graph. The test simulates the graph: it launches the captured kernels
// again.

#include <gtest/gtest.h>

#include "group/device/kernel_executor.h"
#include "support/kernel_executors.h"
#include "support/pools.h"
#include "support/pushes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

class DeviceReplays : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceReplays, testing::Values(1, 2, 3));

/// Replays do not disturb the counts of launched and finished calls.
TEST_P(DeviceReplays, FollowCallsAndAreFollowedByThem) {
  const int ranks = GetParam();
  DeviceWorld world({.ranks = ranks});
  with_executors(
      world,
      [&](DeviceRank& one) {
        const uint64_t first = one.executor->launched();
        std::vector<int32_t> small(5), large(20'000);
        std::vector<Operation> operations;
        operations.push_back(all_reduce(small));
        operations.push_back(all_reduce(large));
        operations.push_back(all_reduce(large));
        EXPECT_FALSE(one.executor->may_be_replayed());
        ASSERT_TRUE(one.capture(operations).ok());
        EXPECT_TRUE(one.executor->may_be_replayed());
        EXPECT_TRUE(one.stream.idle());
        EXPECT_EQ(one.executor->launched(), first);
        for (int turn = 0; turn < 6; ++turn) {
          std::fill(small.begin(), small.end(), one.rank + turn);
          std::fill(large.begin(), large.end(), turn);
          one.replay();
          const Spec spec = spec_of(Collective::kAllGather, 300, ranks, uint64_t(turn));
          EXPECT_EQ(one.perform({spec}), "") << turn;  // this launch follows on the same stream
          EXPECT_EQ(one.executor->finished(), one.executor->launched());
          EXPECT_EQ(one.executor->launched(), first + uint64_t(turn) + 1);
          const auto done = uint32_t(first) + 4 * uint32_t(turn + 1);  // each replay has three operations
          EXPECT_EQ(one.executor->begun_epoch(), done);
          EXPECT_EQ(one.executor->ended_epoch(), done);
          EXPECT_EQ(small, std::vector<int32_t>(5, ranks * turn + ranks * (ranks - 1) / 2));
          EXPECT_EQ(large, std::vector<int32_t>(20'000, ranks * ranks * turn));
        }
      },
      [](ChannelOptions& options) { options.first_epoch = uint32_t(-7); });
}

/// A rank with tensors in a pool that its peers map.
struct Pooled {
  static constexpr size_t kCount = 30'000;
  Pooled(DeviceRank& of, Pools& in)
      : one(of), pools(in), sum(take(kCount)), all(take(size_t(of.world.ranks()) * kCount)) {}

  int32_t* take(size_t n) { return reinterpret_cast<int32_t*>(pools.allocate(one.rank, 4 * n)); }
  /// An all-reduce in place, and an all-gather of its result.
  std::vector<Operation> operations() {
    std::vector<Operation> list(2);
    for (Operation& o : list) o.dtype = DType::kI32, o.in = reinterpret_cast<std::byte*>(sum), o.count = kCount;
    list[0].collective = kernel::Collective::kAllReduce;
    list[0].out = reinterpret_cast<std::byte*>(sum);
    list[1].collective = kernel::Collective::kAllGather;
    list[1].recv = Pieces(size_t(one.world.ranks()));
    for (size_t p = 0; p < list[1].recv.size(); ++p)
      list[1].recv[p] = {reinterpret_cast<std::byte*>(all + p * kCount), 4 * kCount};
    return list;
  }
  void fill(int32_t turn) {
    for (size_t i = 0; i < kCount; ++i) sum[i] = int32_t(i) + one.rank * turn;
    std::fill_n(all, size_t(one.world.ranks()) * kCount, -1);
  }
  void expect(int32_t turn) const {
    const int n = one.world.ranks();
    for (size_t i = 0; i < kCount * size_t(n); ++i)
      ASSERT_EQ(all[i], n * int32_t(i % kCount) + turn * n * (n - 1) / 2) << i;
  }
  void see(size_t granules) {
    for (int p = 0; p < one.world.ranks(); ++p) {
      pools.map(one.rank, p, granules);
      auto& view = const_cast<kernel::PoolView&>(one.executor->resources().channel().pools[p]);
      std::atomic_ref(view.base).store(pools.views(one.rank)[p].base);
      std::atomic_ref(view.mapped).store(pools.views(one.rank)[p].mapped);
    }
  }

  DeviceRank& one;
  Pools& pools;
  int32_t *sum, *all;
};

/// A graph records the addresses of its tensors. Its kernels read at run time which of the peers' pools are mapped.
TEST_P(DeviceReplays, GoWithoutStagingOnceThePoolsAreMapped) {
  const int ranks = GetParam();
  DeviceWorld world({.ranks = ranks});
  Pools pools(ranks, 1);
  with_executors(
      world,
      [&](DeviceRank& one) {
        Pooled mine(one, pools);
        std::vector<Operation> operations = mine.operations();
        ASSERT_TRUE(one.capture(operations).ok());
        for (int32_t turn = 0; turn < 4; ++turn) {
          if (turn == 2) mine.see(1);
          mine.fill(turn);
          if (turn % 2 == 0) {
            one.replay();
          } else {
            ASSERT_TRUE(one.launch(operations).ok());
          }
          EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, ranks, 1)}), "");
          mine.expect(turn);
          // Each of the two operations and each peer counts three: input read, result written, operation done.
          EXPECT_EQ(one.executor->direct(), turn < 2 ? 0u : uint32_t(turn - 1) * 6 * uint32_t(ranks - 1));
        }
      },
      [&](ChannelOptions& options) {
        options.force = PlanFacts::Force::kPipelined;
        options.place_of = [&pools, rank = options.rank](const std::byte* data, size_t bytes) {
          return pools.place_of(rank, data, bytes);
        };
      });
}

TEST(DeviceReplay, RankThatDoesNotReplayIsNamed) {
  DeviceWorld world({.ranks = 2});
  std::atomic<bool> named{false};
  with_executors(world, [&](DeviceRank& one) {
    std::vector<int32_t> data(100, 1), more(7, 1);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(more));
    operations.push_back(all_reduce(data));
    operations[0].number = 3;
    operations[1].number = 4;
    ASSERT_TRUE(one.capture(operations, milliseconds(300)).ok());
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 2, 1)}), "");
    if (one.rank == 1) return void(eventually(milliseconds(30'000), [&] { return named.load(); }));
    one.replay();
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return one.stream.idle(); }));
    const std::string wrong = one.executor->verdict().what();
    EXPECT_EQ(one.executor->verdict().code(), Code::kTimeout);
    EXPECT_TRUE(contains(wrong,
                         "timed out in all_reduce(sum, i32, 7 elements) #3 (in a graph) of group g after 0.30 s, "
                         "waiting for rank 1"))
        << wrong;
    std::fill(data.begin(), data.end(), 5);
    one.replay();
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return one.stream.idle(); }));
    EXPECT_EQ(data, std::vector<int32_t>(100, 5)) << "a rank that has failed writes nothing";
    EXPECT_EQ(one.capture(operations).what(), wrong);
    named = true;
  });
}

TEST(DeviceReplay, ACallThatFailsAmongThemIsNamedByItsOwnNumber) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    std::vector<int32_t> data(100, 1);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(data));
    ASSERT_TRUE(one.capture(operations).ok());
    for (int i = 0; i < 5; ++i) one.replay();
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 2, 1)}), "");
    const Collective call = one.rank == 0 ? Collective::kAllReduce : Collective::kReduceScatter;
    const std::string wrong = one.perform({spec_of(call, 100, 2, 2)});
    EXPECT_TRUE(contains(wrong, " #2 of group g")) << wrong;
  });
}

TEST(DeviceReplay, FailedCaptureLeavesTheGroupUnchanged) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    std::vector<int32_t> data(100, 1);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(data));
    Status& refusal = one.world.launcher(one.rank)->refusal;
    refusal = {Code::kSystem, "nvx: reduction: operation failed due to a previous error during capture"};
    const Status refused = one.capture(operations);
    refusal = {};
    EXPECT_EQ(refused.code(), Code::kInvalid);
    EXPECT_TRUE(contains(refused.what(), "cannot be captured on GPU " + std::to_string(one.rank))) << refused.what();
    EXPECT_TRUE(contains(refused.what(), "Next: end this capture, on all ranks")) << refused.what();
    EXPECT_FALSE(one.executor->may_be_replayed());
    EXPECT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 2, 1)}), "");
  });
}

/// A graph may outlive its group: the memory that it uses stays, and its kernels do nothing.
TEST(DeviceReplay, ReplayAfterTheGroupHasGoneDoesNothing) {
  DeviceWorld world({.ranks = 2});
  std::vector<int32_t> data[2] = {std::vector<int32_t>(100, 1), std::vector<int32_t>(100, 1)};
  std::atomic<int> gone{0};
  with_executors(world, [&](DeviceRank& one) {
    std::vector<Operation> operations;
    operations.push_back(all_reduce(data[one.rank]));
    ASSERT_TRUE(one.capture(operations).ok());
    one.replay();
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 2, 1)}), "");
    EXPECT_TRUE(one.executor->finalize());
    EXPECT_FALSE(one.executor->may_be_replayed());
    ++gone;
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return gone == 2; }));
    one.executor.reset();
    one.replay();
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return one.stream.idle(); }));
    EXPECT_EQ(data[one.rank], std::vector<int32_t>(100, 2));
  });
  for (int rank = 0; rank < 2; ++rank) {
    DeviceArena& arena = world.arena(rank);
    arena.free(arena.allocate(1));
    EXPECT_GT(arena.used(), size_t(0)) << "nobody else gets the pad";
  }
}

/// Kernels read the host's abort word where they wait. A block that begins sees that the rank has failed. The
/// host does not wait for that: the device may hang.
TEST(DeviceReplay, KernelThatBeginsAfterAnAbortWritesNothing) {
  DeviceWorld world({.ranks = 1});
  with_executors(world, [&](DeviceRank& one) {
    std::vector<int32_t> in(1000, 1), out(1000, 0);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(out));
    operations.back().in = reinterpret_cast<std::byte*>(in.data());
    ASSERT_TRUE(one.capture(operations).ok());
    FakeDriver& driver = *world.process(0).driver;
    driver.block("copy");
    const auto began = Clock::now();
    one.executor->abort();
    EXPECT_LT(Clock::now() - began, milliseconds(1000));
    driver.unblock();
    auto& state =
        *reinterpret_cast<kernel::RankState*>(one.executor->resources().channel().state + kernel::DeviceState::rank());
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return std::atomic_ref(state.failed).load() == 1; }));
    one.replay();
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return one.stream.idle(); }));
    EXPECT_EQ(out, std::vector<int32_t>(1000, 0));
    EXPECT_EQ(one.executor->verdict().code(), Code::kAborted);
  });
}

/// The pads of peers may belong to another group by then. Hot kernels write to them before they heed the abort word.
TEST(DeviceReplay, ReplayAfterTheGroupHasGoneWritesNothingToPeers) {
  DeviceWorld world({.ranks = 2});
  std::atomic<int> gone{0};
  with_executors(world, [&](DeviceRank& one) {
    const Spec spec = spec_of(Collective::kAllReduce, 100, 2, 1);
    Side side(spec, one.rank, 2);
    std::vector<Operation> operations;
    operations.push_back(operation_of(spec, side, 2));
    ASSERT_EQ(one.executor->choose(operations[0]).algorithm, kernel::DeviceAlgorithm::kReducePackets);
    ASSERT_TRUE(one.capture(operations).ok());
    one.replay();
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return one.stream.idle(); }));
    EXPECT_EQ(side.verdict(), "");
    const kernel::DeviceChannel channel = one.executor->resources().channel();
    const auto* pads = reinterpret_cast<const kernel::PeerPads*>(channel.state + kernel::DeviceState::pads());
    const std::byte* const theirs = pads[1 - one.rank].theirs;
    EXPECT_TRUE(one.executor->finalize());
    ++gone;
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return gone == 2; }));
    const std::vector<std::byte> before(theirs, theirs + kernel::DevicePad{channel.shape}.bytes());
    for (int i = 0; i < 2; ++i) one.replay();
    EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return one.stream.idle(); }));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), theirs));
  });
}

TEST(DeviceReplay, LeavingWaitsForReplaysAsForCalls) {
  DeviceWorld world({.ranks = 1});
  with_executors(world, [](DeviceRank& one) {
    std::vector<int32_t> data(100, 1);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(data));
    ASSERT_TRUE(one.capture(operations).ok());
    std::atomic<bool>& knows_ends = one.world.launcher(0)->knows_ends;
    knows_ends = false;
    const auto began = std::chrono::steady_clock::now();
    std::thread ends([&] {
      std::this_thread::sleep_for(milliseconds(100));
      knows_ends = true;
    });
    EXPECT_TRUE(one.executor->finalize());
    EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(90));
    ends.join();
  });
}

}  // namespace
}  // namespace nvx::test
