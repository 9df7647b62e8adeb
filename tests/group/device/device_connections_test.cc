// The hardware queues that ranks of one process, and groups, need on a GPU.

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "group/device/block_budget.h"
#include "group/setup/store_bootstrap.h"
#include "support/kernel_executors.h"
#include "support/stores.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// The first rank on a GPU connects once for all of them; each process has its own connections.
TEST(DeviceConnections, RanksOfOneProcessOnOneGpuNeedConnectionsOfTheirOwn) {
  for (const bool processes : {false, true}) {
    DeviceWorld world({.ranks = 3, .gpus = 1, .processes = processes});
    testing::internal::CaptureStderr();
    for (int group = 0; group < 2; ++group) {
      const SharedTable table(3);
      as_threads(3, [&](int rank) {
        SharedBootstrap bootstrap(table, rank);
        EXPECT_FALSE(failure_to_make(world, rank, bootstrap));
      });
    }
    const std::string text = testing::internal::GetCapturedStderr();
    const std::string words = "GPU 0: 3 ranks of this process share it";
    const size_t first = text.find(words);
    EXPECT_EQ(first == std::string::npos, processes) << text;
    if (processes) continue;
    EXPECT_EQ(text.find(words, first + 1), std::string::npos) << text;
  }
  EXPECT_EQ(connections_warning(1, nullptr), "");
  EXPECT_EQ(connections_warning(4, "32"), "");
  EXPECT_NE(connections_warning(4, "8"), "");
  EXPECT_NE(connections_warning(2, "-1"), "");
  EXPECT_TRUE(contains(connections_warning(4, nullptr), "CUDA_DEVICE_MAX_CONNECTIONS is not set"));
  const std::string one = connections_warning(4, "1");
  EXPECT_TRUE(contains(one, "4 ranks of this process share it, and CUDA_DEVICE_MAX_CONNECTIONS is 1: ")) << one;
  EXPECT_TRUE(contains(one, "Next: set CUDA_DEVICE_MAX_CONNECTIONS=32")) << one;
}

/// CUDA loads a kernel at its first launch, unless configured otherwise; that may wait for what runs.
TEST(DeviceConnections, RanksOfOneProcessOnOneGpuNeedTheirKernelsLoaded) {
  DeviceWorld world({.ranks = 2, .gpus = 1});
  const SharedTable table(2);
  testing::internal::CaptureStderr();
  as_threads(2, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    EXPECT_FALSE(failure_to_make(world, rank, bootstrap));
  });
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(text, "GPU 0: CUDA_MODULE_LOADING is not set, and 2 ranks of this process share it: ")) << text;
  EXPECT_TRUE(contains(text, "Next: set CUDA_MODULE_LOADING=EAGER")) << text;
  EXPECT_EQ(eager_loading_warning(1, nullptr), "");
  EXPECT_EQ(eager_loading_warning(2, "EAGER"), "");
  EXPECT_NE(eager_loading_warning(2, "LAZY"), "");
}

/// Two groups of one rank each.
std::vector<std::unique_ptr<DeviceRank>> two_groups(DeviceWorld& world) {
  std::vector<std::unique_ptr<DeviceRank>> groups;
  for (int i = 0; i < 2; ++i) {
    const SharedTable table(1);
    SharedBootstrap bootstrap(table, 0);
    groups.push_back(std::make_unique<DeviceRank>(world, 0, world.make(0, bootstrap, world.options(0))));
  }
  return groups;
}

TEST(DeviceConnections, GroupsThatUseMoreStreamsThanThereAreConnectionsAreWarnedOnce) {
  DeviceWorld world({.ranks = 1});
  const auto groups = two_groups(world);
  std::array<SimulatedStream, 11> streams;
  const auto launch_on = [&](size_t first, size_t end, size_t group) {
    testing::internal::CaptureStderr();
    for (size_t i = first; i < end; ++i) {
      std::vector<int32_t> data(10, 1);
      const Operation sum = all_reduce(data);
      const Operation* const list[] = {&sum};
      EXPECT_TRUE(groups[group]->executor->launch(list, {.native = &streams[i]}, milliseconds(0)).ok());
      EXPECT_TRUE(groups[group]->await().ok());
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return streams[i].idle(); }));
    }
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(launch_on(0, 9, 0), "") << "kernels of one group wait for each other in any case";
  EXPECT_TRUE(contains(launch_on(8, 9, 1),
                       "GPU 0: 2 groups of this process use 9 of its streams, more than the 8 hardware queues, and "
                       "CUDA_DEVICE_MAX_CONNECTIONS is not set: "));
  EXPECT_EQ(launch_on(9, 11, 1), "");
  EXPECT_EQ(connections_warning_for(2, 8, nullptr), "");
  EXPECT_EQ(connections_warning_for(2, 32, "32"), "");
  EXPECT_TRUE(contains(connections_warning_for(2, 2, "1"), "Next: set CUDA_DEVICE_MAX_CONNECTIONS=32"));
  EXPECT_TRUE(contains(connections_warning_for(3, 33, "32"), "Next: call the groups in one order on all ranks"));
}

/// A graph keeps no order between its branches, so kernels of captured streams need hardware queues too.
TEST(DeviceConnections, StreamsOfCapturesCount) {
  DeviceWorld world({.ranks = 1});
  const auto groups = two_groups(world);
  std::array<SimulatedStream, 9> streams;
  testing::internal::CaptureStderr();
  for (size_t i = 0; i < streams.size(); ++i) {
    std::vector<int32_t> data(10, 1);
    const Operation sum = all_reduce(data);
    const Operation* const list[] = {&sum};
    EXPECT_TRUE(groups[i % 2]->executor->launch(list, {.native = &streams[i], .capture = 1}, milliseconds(0)).ok());
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(text, "GPU 0: 2 groups of this process use 9 of its streams, more than the 8 hardware queues"))
      << text;
}

}  // namespace
}  // namespace nvx::test
