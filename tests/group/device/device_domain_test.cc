// Ranks on several hosts whose GPUs are in one NVLink domain: only fabric handles reach across.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "group/setup/store_bootstrap.h"
#include "support/kernel_executors.h"
#include "support/pushes.h"
#include "support/stores.h"

namespace nvx::test {
namespace {

/// Two ranks on each host.
void spread(ChannelOptions& options) { options.host = 1 + uint64_t(options.rank) / 2; }

/// All ranks fail to make a group of kernels, for these reasons.
void expect_none(DeviceWorld& world, const std::vector<std::string>& reasons) {
  MemoryStore store;
  as_threads(4, [&](int rank) {
    StoreBootstrap bootstrap(store, {.prefix = "here", .rank = rank, .ranks = 4});
    ChannelOptions options = world.options(rank);
    spread(options);
    try {
      (void)world.make(rank, bootstrap, options);
      ADD_FAILURE() << rank << " " << reasons[0];
    } catch (const Error& error) {
      for (const std::string& reason : reasons) EXPECT_TRUE(contains(error.what(), reason)) << error.what();
    }
  });
}

TEST(DeviceDomain, RanksOfTwoHostsAreOneGroupOfKernels) {
  DeviceWorld world({.ranks = 4, .processes = true});
  with_executors(
      world,
      [](DeviceRank& one) {
        for (int peer = 0; peer < 4; ++peer) {
          if (peer == one.rank) continue;
          EXPECT_EQ(one.executor->resources().mappings().peer(peer).kind, ShareKind::kFabric) << peer << one.rank;
        }
        uint64_t round = 0;
        for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
                                            Collective::kBroadcast, Collective::kAllToAll, Collective::kGather}) {
          for (const size_t n : {7, 12000})
            ASSERT_EQ(one.perform({spec_of(collective, n, 4, ++round)}), "") << name(collective) << n;
        }
      },
      spread);
}

/// On one host the ranks would agree on file descriptors. All ranks learn the reason.
TEST(DeviceDomain, WithoutFabricHandlesOfAllRanksThereIsNone) {
  for (const char* call : {"export_fabric", "import_fabric"}) {
    DeviceWorld world({.ranks = 4, .processes = true});
    world.process(1).driver->refuse(call, 100);
    expect_none(world, {"no fabric handle: rank 1: ", "no file descriptor: the ranks are on several hosts"});
  }
}

/// A pair of one host has pinned host memory as well; a pair of two hosts has nothing else.
TEST(DeviceDomain, APairOfTwoHostsThatIsApartEndsTheDomain) {
  DeviceWorld world({.ranks = 4, .processes = true});
  for (int r = 0; r < 4; ++r) world.process(r).driver->pairs(0, 2, FakeDriver::PeerAccess::kRefuses);
  expect_none(world, {"rank 0 and rank 2 share neither GPU memory", "they are on different hosts"});
}

}  // namespace
}  // namespace nvx::test
