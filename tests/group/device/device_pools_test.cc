// Ranks map each other's GPU memory pools while launches go on; until a pool is mapped, its tensors are staged.

#include "group/device/device_pools.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>

#include "support/gpu_processes.h"
#include "support/kernel_executors.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// As the kernels of `one` see the peer's pool.
kernel::PoolView view_of(const DeviceRank& one, int peer) {
  const kernel::PoolView& view = one.executor->resources().channel().pools[peer];
  const auto read = [](const uint64_t& word) { return std::atomic_ref(const_cast<uint64_t&>(word)).load(); };
  return {read(view.base), read(view.mapped)};
}

/// The ranks of a group as threads: the memory of their pads, and collective calls.
class Together {
 public:
  explicit Together(int ranks) : ranks_(ranks), all_(ranks) {}

  PoolSizes sizes_of(int rank) {
    return {[this, rank](uint64_t bytes) { grown_[size_t(rank)] = bytes; },
            [this](int other) { return grown_[size_t(other)].load(); }};
  }
  void barrier() { all_.arrive_and_wait(); }

  /// Repeats calls until `holds` is true on every rank. Each result must be right, whether its memory is mapped or not.
  bool call_until(DeviceRank& one, const std::function<bool()>& holds) {
    bool done = false;
    for (int i = 0; i < 5000 && !done; ++i) {
      std::vector<int32_t> data(100, one.rank + 1);
      std::vector<Operation> sum;
      sum.push_back(all_reduce(data));
      EXPECT_TRUE(one.launch(sum).ok());
      EXPECT_TRUE(one.await().ok());
      EXPECT_EQ(data[99], ranks_ * (ranks_ + 1) / 2);
      if (holds()) ++there_;
      barrier();
      done = there_ == ranks_;
      barrier();
      if (one.rank == 0) there_ = 0;
      barrier();
      if (!done) std::this_thread::sleep_for(milliseconds(1));
    }
    return done;
  }
  bool call_until_mapped(DeviceRank& one, uint64_t far) {
    return call_until(one, [&] {
      for (int r = 0; r < ranks_; ++r) {
        if (r != one.rank && view_of(one, r).mapped < far) return false;
      }
      return true;
    });
  }

 private:
  const int ranks_;
  std::array<std::atomic<uint64_t>, 8> grown_{};
  std::atomic<int> there_{0};
  std::barrier<> all_;
};

/// Runs `body` on every rank of the group, with pools. The ranks are processes, or threads of one process.
void with_pools(DeviceWorld& world, Together& together, const std::function<void(DeviceRank&)>& body) {
  with_executors(
      world,
      [&](DeviceRank& one) {
        body(one);
        together.barrier();  // no rank frees its memory before all have checked
      },
      [&](ChannelOptions& options) { options.pool_sizes = together.sizes_of(options.rank); });
}

TEST(DevicePools, AreMappedAsTheyGrow) {
  constexpr int kRanks = 3;
  DeviceWorld world({.ranks = kRanks, .gpus = 2, .processes = true});  // two of the processes share a GPU
  Together together(kRanks);
  with_pools(world, together, [&](DeviceRank& one) {
    DevicePool& mine = world.process(one.rank).registry->pool(one.rank % 2);
    EXPECT_EQ(view_of(one, (one.rank + 1) % kRanks).mapped, 0u);
    *memory(mine.allocate(2 * M) + 5) = std::byte(10 + one.rank);
    EXPECT_TRUE(together.call_until_mapped(one, 2 * M));
    *memory(mine.allocate(4 * M) + 4 * M - 1) = std::byte(20 + one.rank);
    EXPECT_TRUE(together.call_until_mapped(one, 6 * M));
    for (int r = 0; r < kRanks; ++r) {
      if (r == one.rank) continue;
      const kernel::PoolView view = view_of(one, r);
      EXPECT_EQ(view.mapped, 6 * M);
      EXPECT_EQ(*memory(view.base + 5), std::byte(10 + r));
      EXPECT_EQ(*memory(view.base + 6 * M - 1), std::byte(20 + r));
    }
  });
}

TEST(DevicePools, OfOneProcessHaveTheirOwnersAddresses) {
  DeviceWorld world({.ranks = 3, .gpus = 2});  // ranks 0 and 2 share a GPU and a pool
  Together together(3);
  with_pools(world, together, [&](DeviceRank& one) {
    DeviceRegistry& registry = *world.process(0).registry;
    if (one.rank < 2) (void)registry.pool(one.rank).allocate(2 * M);
    EXPECT_TRUE(together.call_until_mapped(one, 2 * M));
    for (int r = 0; r < 3; ++r) {
      if (r == one.rank) continue;
      EXPECT_EQ(view_of(one, r).base, registry.pool(r % 2).base());
    }
  });
}

TEST(DevicePools, ARefusalIsStagedUntilThePoolGrowsFurther) {
  DeviceWorld world({.ranks = 2, .processes = true});
  Together together(2);
  with_pools(world, together, [&](DeviceRank& one) {
    Process& process = world.process(one.rank);
    DevicePool& mine = process.registry->pool(one.rank);
    if (one.rank == 0) process.driver->refuse("import_fd", 2);
    const int before = process.driver->calls_of("import_fd");
    (void)mine.allocate(2 * M);
    EXPECT_TRUE(together.call_until(one, [&] {
      return one.rank == 0 ? process.driver->calls_of("import_fd") > before : view_of(one, 0).mapped == 2 * M;
    }));
    int calls = 0;
    EXPECT_TRUE(together.call_until(one, [&] { return ++calls > 20; }));
    if (one.rank == 0) {
      EXPECT_EQ(view_of(one, 1).mapped, 0u);
      EXPECT_EQ(process.driver->calls_of("import_fd"), before + 1) << "not at every launch";
      process.driver->refuse("import_fd", 0);
    }
    (void)mine.allocate(2 * M);
    EXPECT_TRUE(together.call_until_mapped(one, 4 * M));
  });
}

TEST(DevicePools, ADriverThatHangsInMappingBlocksNoRank) {
  DeviceWorld world({.ranks = 2, .processes = true, .timeout = milliseconds(300)});
  Together together(2);
  with_pools(world, together, [&](DeviceRank& one) {
    Process& process = world.process(one.rank);
    (void)process.registry->pool(one.rank).allocate(2 * M);
    const int before = process.driver->calls_of("import_fd");
    if (one.rank == 0) process.driver->block("import_fd");
    EXPECT_TRUE(together.call_until(one, [&] {
      return one.rank == 0 ? process.driver->calls_of("import_fd") > before : view_of(one, 0).mapped == 2 * M;
    }));
    std::this_thread::sleep_for(milliseconds(700));  // longer than the wait for it
    (void)process.registry->pool(one.rank).allocate(2 * M);
    EXPECT_TRUE(together.call_until(one, [&] { return one.rank == 0 || view_of(one, 0).mapped == 4 * M; }));
    if (one.rank == 0) {
      EXPECT_EQ(process.driver->calls_of("import_fd"), before + 1) << "it is not called again";
      EXPECT_EQ(view_of(one, 1).mapped, 0u);
      const auto pool = process.registry->peer_pool(0, {world.process(1).registry->id(), 1, "none"});
      EXPECT_TRUE(pool->is_given_up()) << "nor by another group of the process";
      process.driver->unblock();
    }
  });
}

TEST(DevicePools, GroupsShareMappingsAndTheLastOneReleasesThem) {
  DeviceWorld world({.ranks = 2, .processes = true});
  Together first(2), second(2);
  const auto mapped = [&] { return world.process(0).driver->calls_of("import_fd"); };
  with_pools(world, first, [&](DeviceRank& one) {
    (void)world.process(one.rank).registry->pool(one.rank).allocate(2 * M);
    EXPECT_TRUE(first.call_until_mapped(one, 2 * M));
    const int before = mapped();
    first.barrier();
    if (one.rank == 0) {  // the second group has both ranks
      with_pools(world, second, [&](DeviceRank& other) {
        EXPECT_EQ(view_of(other, 1 - other.rank).mapped, 2 * M) << "from the beginning";
        EXPECT_TRUE(second.call_until_mapped(other, 2 * M));
      });
      EXPECT_LE(mapped(), before + 2) << "its arena's, and what it was probed with";
    }
    first.barrier();
    EXPECT_TRUE(first.call_until_mapped(one, 2 * M));
  });
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(world.process(r).registry->peer_pool(r, {world.process(1 - r).registry->id(), 1 - r, "none"})->mapped(),
              0u)
        << "nobody keeps it any more";
  }
}

TEST(DevicePools, StayMappedWhereKernelsMayYetRun) {
  DeviceWorld world({.ranks = 2, .processes = true});
  Together together(2);
  with_pools(world, together, [&](DeviceRank& one) {
    (void)world.process(one.rank).registry->pool(one.rank).allocate(2 * M);
    EXPECT_TRUE(together.call_until_mapped(one, 2 * M));
    std::vector<int32_t> data(100, 1);
    std::vector<Operation> sum;
    sum.push_back(all_reduce(data));
    EXPECT_TRUE(one.capture(sum).ok());  // a graph may be replayed at any time
  });
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(world.process(r).registry->peer_pool(r, {world.process(1 - r).registry->id(), 1 - r, "none"})->mapped(),
              2 * M);
  }
}

TEST(DevicePools, WhereDevicesDoNotReachEachOtherNothingIsMapped) {
  DeviceWorld world({.ranks = 2, .processes = true});
  for (int r = 0; r < 2; ++r) world.process(r).driver->pairs(0, 1, FakeDriver::PeerAccess::kRefuses);
  Together together(2);
  with_pools(world, together, [&](DeviceRank& one) {
    (void)world.process(one.rank).registry->pool(one.rank).allocate(2 * M);
    int calls = 0;
    EXPECT_TRUE(together.call_until(one, [&] { return ++calls > 20; }));
    EXPECT_EQ(view_of(one, 1 - one.rank).mapped, 0u);
  });
}

}  // namespace
}  // namespace nvx::test
