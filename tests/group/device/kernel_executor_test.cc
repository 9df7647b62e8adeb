// Collectives on GPUs. The host simulates the GPUs and the kernels: ranks are threads, and so are the lanes of their
// kernels.

#include "group/device/kernel_executor.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "group/setup/store_bootstrap.h"
#include "support/kernel_executors.h"
#include "support/pushes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using PeerAccess = FakeDriver::PeerAccess;
using WorldShape = DeviceWorld::Shape;

constexpr Collective kCollectives[] = {Collective::kAllReduce, Collective::kReduce,    Collective::kReduceScatter,
                                       Collective::kAllGather, Collective::kBroadcast, Collective::kAllToAll,
                                       Collective::kGather,    Collective::kScatter,   Collective::kBarrier};

/// Runs every collective, with lengths that reach every algorithm.
void run_all(DeviceRank& one, std::initializer_list<size_t> lengths) {
  uint64_t round = 0;
  for (const size_t n : lengths) {
    for (const Collective collective : kCollectives) {
      ++round;
      Spec spec = spec_of(collective, n, one.world.ranks(), round);
      spec.in_place = round % 2 == 0;
      spec.shift = round % 3 * 4;
      ASSERT_EQ(one.perform({spec}), "") << name(collective) << n;
    }
  }
}

class KernelExecutors : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, KernelExecutors, testing::Values(1, 2, 3, 8));

TEST_P(KernelExecutors, RunEveryCollective) {
  DeviceWorld world({.ranks = GetParam()});
  with_executors(world, [](DeviceRank& one) {
    run_all(one, {0, 7, 3000});
    if (as_fast(1, 0)) run_all(one, {12000, 40001});
  });
}

TEST_P(KernelExecutors, RunInChunksAndAcrossTheWrap) {
  DeviceWorld world({.ranks = GetParam()});
  with_executors(
      world,
      [](DeviceRank& one) {
        run_all(one, {1, 771});
        EXPECT_EQ(one.executor->launched(), (uint64_t(1) << 32) - 5 + 18);
        EXPECT_EQ(one.executor->finished(), one.executor->launched());
      },
      [](ChannelOptions& options) {
        options.force = PlanFacts::Force::kPipelined;
        options.first_epoch = uint32_t(-5);
      });
}

TEST_P(KernelExecutors, RunSeveralInOneCall) {
  const int ranks = GetParam();
  DeviceWorld world({.ranks = ranks});
  with_executors(world, [&](DeviceRank& one) {
    std::vector<Spec> specs;
    for (uint64_t i = 0; i < 20; ++i) specs.push_back(spec_of(kCollectives[i % 9], 100 + 3 * i, ranks, i));
    EXPECT_EQ(one.perform(specs), "");
    EXPECT_EQ(one.world.launcher(one.rank)->launches, 2) << "of 16 and of 4";
  });
}

TEST(KernelExecutor, RanksMayBeProcesses) {
  DeviceWorld world({.ranks = 3, .processes = true});
  with_executors(world, [](DeviceRank& one) {
    EXPECT_EQ(one.executor->resources().mappings().peer((one.rank + 1) % 3).kind, ShareKind::kFabric);
    run_all(one, {7, 12000});
  });
}

TEST(KernelExecutor, SeveralRanksMayShareAGpu) {
  DeviceWorld world({.ranks = 3, .gpus = 1, .resident = 5});
  with_executors(world, [](DeviceRank& one) {
    EXPECT_EQ(one.executor->shape().blocks, 1u);
    EXPECT_EQ(one.executor->resources().why_fewer_blocks(),
              "GPU 0 of the group holds 5 blocks at once; its 3 ranks need all of their blocks there at once: 1 per "
              "rank fit");
    run_all(one, {7, 12000});
  });
}

/// With CUDA_VISIBLE_DEVICES, device numbers are local to a process. Ranks with two numbers for one GPU share it, and
/// ranks with one number for two GPUs do not.
TEST(KernelExecutor, ProcessesMayNumberTheirGpusDifferently) {
  const struct {
    int devices[2];
    bool same;
    uint32_t blocks;
  } kTable[] = {{{0, 1}, true, 1}, {{1, 0}, true, 1}, {{0, 0}, false, 2}, {{1, 1}, false, 2}};
  for (const auto& row : kTable) {
    DeviceWorld world({.ranks = 2, .gpus = 2, .processes = true, .resident = 8});
    world.process(1).driver->set_visible({1, 0});
    const auto choose = [&](ChannelOptions& options) { options.device = row.devices[options.rank]; };
    with_executors(
        world,
        [&](DeviceRank& one) {
          EXPECT_EQ(one.executor->resources().mappings().peer(1 - one.rank).same_gpu, row.same)
              << row.devices[0] << row.devices[1];
          EXPECT_EQ(one.executor->shape().blocks, row.blocks) << row.devices[0] << row.devices[1];
          run_all(one, {7, 12000});
        },
        choose);
  }
}

TEST(KernelExecutor, APairThatIsApartUsesHostMemory) {
  for (const bool processes : {false, true}) {
    DeviceWorld world({.ranks = 3, .processes = processes});
    for (int r = 0; r < 3; ++r) world.process(r).driver->pairs(0, 1, PeerAccess::kRefuses);
    with_executors(world, [&](DeviceRank& one) {
      const PeerMappings& mappings = one.executor->resources().mappings();
      for (int peer = 0; peer < 3; ++peer) {
        const bool apart = peer + one.rank == 1;
        EXPECT_EQ(mappings.peer(peer).kind == ShareKind::kHost, apart) << peer << one.rank;
      }
      run_all(one, {7, 12000});
    });
  }
}

TEST(KernelExecutor, ManyGroupsShareAnArena) {
  DeviceWorld world({.ranks = 2});
  std::vector<std::unique_ptr<SharedTable>> tables;
  for (int g = 0; g < 4; ++g) tables.push_back(std::make_unique<SharedTable>(2));
  as_threads(2, [&](int rank) {
    std::vector<std::unique_ptr<DeviceRank>> groups;
    for (const auto& table : tables) {
      SharedBootstrap bootstrap(*table, rank);
      ChannelOptions options = world.options(rank);
      options.blocks = 8;
      groups.push_back(std::make_unique<DeviceRank>(world, rank, world.make(rank, bootstrap, options)));
    }
    EXPECT_GT(groups[0]->executor->shape().packets, groups[3]->executor->shape().packets) << "later ones get less";
    for (uint64_t i = 0; i < 8; ++i) {
      const size_t g = size_t(i % 4);
      EXPECT_EQ(groups[g]->perform({spec_of(Collective::kAllReduce, 5000 * (g + 1), 2, i)}), "");
    }
  });
}

TEST(KernelExecutor, APadIsUsedAgainWhenAllHaveGone) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 2, 1)}), "");
    EXPECT_GT(one.world.arena(one.rank).used(), size_t(0));
  });
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world.arena(rank).used(), size_t(0));
}

TEST(KernelExecutor, DependentOperationsGetSeparateLaunches) {
  constexpr size_t kCount = 1000;
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    std::vector<int32_t> a(kCount), b(kCount), both(2 * kCount);
    std::iota(a.begin(), a.end(), one.rank);
    std::iota(b.begin(), b.end(), 10 * one.rank);
    Operation gather;
    gather.collective = Collective::kAllGather;
    gather.dtype = DType::kI32;
    gather.in = reinterpret_cast<std::byte*>(b.data());
    gather.count = 2 * kCount;
    gather.recv = Pieces(2);
    for (size_t p = 0; p < 2; ++p) gather.recv[p] = {reinterpret_cast<std::byte*>(&both[p * kCount]), 4 * kCount};
    std::vector<Operation> operations;
    operations.push_back(all_reduce(a));
    operations.push_back(all_reduce(b));  // independent of the first
    operations.push_back(all_reduce(a));  // reads the result of the previous one
    operations.push_back(std::move(gather));
    ASSERT_TRUE(one.launch(operations).ok());
    ASSERT_TRUE(one.await().ok()) << one.executor->verdict().what();
    EXPECT_EQ(one.world.launcher(one.rank)->launches, 2);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(a[i], 2 * int32_t(2 * i + 1));
      ASSERT_EQ(both[i], int32_t(2 * i + 10));
      ASSERT_EQ(both[kCount + i], both[i]);
    }
  });
}

// ---- failed operations

TEST(KernelExecutor, AMismatchIsNamedOnBothRanks) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    EXPECT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 2, 1)}), "");
    const Collective call = one.rank == 0 ? Collective::kAllReduce : Collective::kReduceScatter;
    const std::string wrong = one.perform({spec_of(call, 100, 2, 2)});
    EXPECT_TRUE(contains(wrong, "collective mismatch in group g at ")) << wrong;
    EXPECT_TRUE(contains(wrong, "all_reduce(sum, f32, 100 elements)")) << wrong;
    EXPECT_TRUE(contains(wrong, "reduce_scatter(sum, f32, 200 elements)")) << wrong;
    EXPECT_TRUE(contains(wrong, "rank " + std::to_string(1 - one.rank) + " called")) << wrong;
    EXPECT_TRUE(contains(wrong, "this is rank " + std::to_string(one.rank) + " in ")) << wrong;
    EXPECT_TRUE(contains(wrong, " #2 of group g")) << wrong;
    EXPECT_TRUE(contains(wrong, kCallAlike)) << wrong;
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 2, 3)}), wrong) << "the first failure stays";
    EXPECT_EQ(one.executor->launched(), uint64_t(2)) << "what comes later is not begun";
    EXPECT_EQ(one.executor->finished(), uint64_t(1));
  });
}

TEST(KernelExecutor, SizesThatDifferWithinAPairAreNamed) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    Spec spec{.collective = Collective::kAllToAll, .counts = {10, 10}};
    if (one.rank == 1) spec.counts = {30, 30};
    const std::string wrong = one.perform({spec});
    const std::string expected =
        one.rank == 0 ? "40 bytes from rank 1, which sends 120 bytes" : "120 bytes from rank 0, which sends 40 bytes";
    EXPECT_TRUE(contains(wrong, " in all_to_all(f32) #1 ") && contains(wrong, expected)) << wrong;
    EXPECT_TRUE(contains(wrong, "split sizes")) << wrong;
  });
}

TEST(KernelExecutor, AbsentRankIsNamed) {
  DeviceWorld world({.ranks = 3});
  std::atomic<int> named{0};
  with_executors(world, [&](DeviceRank& one) {
    EXPECT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 3, 1)}), "");
    if (one.rank == 2) return void(eventually(milliseconds(30'000), [&] { return named == 2; }));
    const Spec spec = spec_of(Collective::kAllReduce, 100, 3, 2);
    Side side(spec, one.rank, 3);
    std::vector<Operation> operations;
    operations.push_back(operation_of(spec, side, 3));
    ASSERT_TRUE(one.launch(operations, milliseconds(300)).ok());
    const std::string wrong = one.await().what();
    EXPECT_EQ(one.executor->verdict().code(), Code::kTimeout);
    EXPECT_TRUE(contains(wrong,
                         "timed out in all_reduce(sum, f32, 100 elements) #2 of group g after 0.30 s, waiting "
                         "for rank 2; this is rank"))
        << wrong;
    EXPECT_TRUE(contains(wrong, "Next: see the log of that rank; if it is only slow, raise the timeout (init"))
        << wrong;
    EXPECT_EQ(one.launch(operations).what(), wrong);
    ++named;
  });
}

TEST(KernelExecutor, AnyThreadMayAbort) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    if (one.rank == 1) return;
    const Spec spec = spec_of(Collective::kAllReduce, 100, 2, 1);
    Side side(spec, 0, 2);
    std::vector<Operation> operations;
    operations.push_back(operation_of(spec, side, 2));
    ASSERT_TRUE(one.launch(operations, milliseconds(0)).ok());
    std::thread([&] { one.executor->abort(); }).join();
    EXPECT_EQ(one.executor->verdict().code(), Code::kAborted);
    EXPECT_TRUE(contains(one.executor->verdict().what(), "group g was aborted on rank 0"))
        << one.executor->verdict().what();
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return one.stream.idle(); })) << "the kernel has ended";
    EXPECT_EQ(one.launch(operations).code(), Code::kAborted);
    one.executor->abort();
    EXPECT_EQ(one.executor->verdict().code(), Code::kAborted);
  });
}

/// Memory of legacy IPC ends with its owner: a store to it would fail all later work of this process on the GPU.
TEST(KernelExecutor, NothingIsWrittenToARankThatIsDead) {
  for (const bool is_dead : {false, true}) {
    DeviceWorld world({.ranks = 2});
    const auto body = [&](DeviceRank& one) {
      if (one.rank == 1) return;
      const Spec spec = spec_of(Collective::kAllReduce, 100, 2, 1);
      Side side(spec, 0, 2);
      std::vector<Operation> operations;
      operations.push_back(operation_of(spec, side, 2));
      const kernel::DeviceChannel channel = one.executor->resources().channel().prepared();
      const auto* pads = reinterpret_cast<const kernel::PeerPads*>(channel.state + kernel::DeviceState::pads());
      const auto theirs = [&](kernel::Part part) {
        return pads[1].theirs + channel.offset(part, /*block=*/0, /*sender=*/0);
      };
      const auto arrivals = [&] {
        std::vector<uint64_t> words;
        for (const kernel::Part part : {kernel::Part::kArrivals, kernel::Part::kArrivalsOdd})
          words.push_back(std::atomic_ref(reinterpret_cast<kernel::Packet*>(theirs(part))->halves[0]).load());
        return words;
      };
      const std::vector<uint64_t> before = arrivals();
      ASSERT_TRUE(one.launch(operations, milliseconds(0)).ok());
      // A block that an abort stops at its start writes nothing at all; one that has sent its arrival shares its
      // tensors.
      ASSERT_TRUE(eventually(milliseconds(10'000), [&] { return arrivals() != before; }));
      if (is_dead) one.executor->note_dead(1);
      one.executor->abort();
      ASSERT_TRUE(eventually(milliseconds(10'000), [&] { return one.stream.idle(); }));
      const auto& counters = *reinterpret_cast<const kernel::PeerCounters*>(theirs(kernel::Part::kCounters));
      EXPECT_EQ(counters.quit >> 32, is_dead ? 0u : 1u) << "that its tensors may be gone";
    };
    with_executors(world, body, [](ChannelOptions& options) { options.force = PlanFacts::Force::kPipelined; });
  }
}

TEST(KernelExecutor, UnsupportedOperationIsRefusedAndTheGroupStays) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    Spec spec = spec_of(Collective::kAllReduce, 100, 2, 1);
    Side side(spec, one.rank, 2);
    std::vector<Operation> operations;
    operations.push_back(operation_of(spec, side, 2));
    operations[0].op = ReduceOp::kBand;  // not defined for f32
    EXPECT_EQ(one.launch(operations).code(), Code::kInvalid);
    EXPECT_EQ(one.perform({spec}), "");
  });
}

TEST(KernelExecutor, ADeviceThatTakesNoMoreFailsTheGroup) {
  DeviceWorld world({.ranks = 1});
  with_executors(
      world,
      [](DeviceRank& one) {
        Status& refusal = one.world.launcher(0)->refusal;
        refusal = {Code::kSystem, "nvx: several: an illegal memory access was encountered"};
        const std::string wrong = one.perform({spec_of(Collective::kBarrier, 0, 1, 1)});
        EXPECT_TRUE(contains(wrong, "GPU 0 of rank 0 cannot launch operations of group g: several: an illegal"))
            << wrong;
        refusal = {};
        EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 1, 1)}), wrong);
      },
      [](ChannelOptions& options) { options.drain_timeout = milliseconds(50); });
}

/// Each ends within the limit, and all of them together do not.
TEST(KernelExecutor, LeavesAfterTheOperationsInFlightThatEndOneByOne) {
  constexpr int kOperations = 8;
  const milliseconds each(as_fast(60, 200));
  DeviceWorld world({.ranks = 1});
  with_executors(
      world,
      [&](DeviceRank& one) {
        std::vector<std::vector<int32_t>> sums(kOperations, std::vector<int32_t>(100, 7));
        for (std::vector<int32_t>& sum : sums) {
          one.stream.post([each] { std::this_thread::sleep_for(each); });
          std::vector<Operation> operation;
          operation.push_back(all_reduce(sum));
          operation[0].number = ++one.number;
          ASSERT_TRUE(one.launch(operation).ok());
        }
        EXPECT_TRUE(one.executor->finalize());
        EXPECT_EQ(one.executor->finished(), uint64_t(kOperations));
        EXPECT_TRUE(one.executor->verdict().ok()) << one.executor->verdict().what();
      },
      [&](ChannelOptions& options) { options.drain_timeout = each * 5; });
}

TEST(KernelExecutor, RefusalCarriesItsAdvice) {
  DeviceWorld world({.ranks = 1});
  with_executors(
      world,
      [](DeviceRank& one) {
        one.world.launcher(0)->refusal = {Code::kSystem, "nvx: no file can be opened", "raise the limit (ulimit -n)"};
        const std::string wrong = one.perform({spec_of(Collective::kBarrier, 0, 1, 1)});
        EXPECT_TRUE(contains(wrong, "group g: no file can be opened. Next: raise the limit (ulimit -n)")) << wrong;
        EXPECT_FALSE(contains(wrong, "CUDA_LAUNCH_BLOCKING")) << wrong;
      },
      [](ChannelOptions& options) { options.drain_timeout = milliseconds(50); });
}

TEST(KernelExecutor, AbortCanCarryAReason) {
  DeviceWorld world({.ranks = 1});
  with_executors(world, [](DeviceRank& one) {
    one.executor->abort({Code::kPeerFailed, "nvx: rank 3 has failed elsewhere"});
    EXPECT_EQ(one.perform({spec_of(Collective::kBarrier, 0, 1, 1)}), "nvx: rank 3 has failed elsewhere");
  });
}

}  // namespace
}  // namespace nvx::test
