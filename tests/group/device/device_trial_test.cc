// The first operations of a group's kernels: which of them show that kernels must not be used, and what ranks do then.

#include "group/device/device_trial.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <string>
#include <utility>

#include "group/setup/store_bootstrap.h"
#include "support/kernel_executors.h"
#include "support/results.h"
#include "support/stores.h"
#include "support/ways.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

using PeerAccess = FakeDriver::PeerAccess;

/// An all-reduce over all ranks of a world, as the first collective of a group.
std::string first_sum(DeviceRank& one) { return one.perform({spec_of(Collective::kAllReduce, 3000, 3, 1)}); }

TEST(DeviceTrial, IsNoOperationOfTheGroup) {
  DeviceWorld world({.ranks = 3});
  with_executors(world, [&](DeviceRank& one) {
    EXPECT_EQ(world.launcher(one.rank)->trials, int(kTrialEpochs));
    EXPECT_EQ(world.launcher(one.rank)->launches, 0);
    EXPECT_EQ(one.executor->launched(), one.executor->finished());
    EXPECT_EQ(one.executor->resources().mappings().fallbacks(), "");
    EXPECT_EQ(first_sum(one), "");
  });
}

/// Copies between two of three ranks work, but stores by their kernels do not. All ranks learn of it in set-up and the
/// pair uses host memory, so no operation runs into its timeout. Later groups reuse the finding.
TEST(DeviceTrial, APairWhoseStoresDoNotArriveUsesHostMemory) {
  const struct {
    PeerAccess access;
    const char* reason;
  } kRows[] = {
      {PeerAccess::kLosesKernelStores, "no store of a kernel arrives, but copied data is intact"},
      {PeerAccess::kLosesFlags, "no signal of a kernel arrives, but copied data is intact"},
      {PeerAccess::kCorruptsPackets, "data that kernels send is corrupt, but copied data is intact"},
  };
  for (const auto& row : kRows) {
    for (const bool processes : {false, true}) {
      if (is_sanitized() && processes != (row.access == PeerAccess::kLosesFlags)) continue;
      DeviceWorld world({.ranks = 3, .processes = processes});
      // A failure in one direction is enough.
      for (int r = 0; r < 3; ++r) world.process(r).driver->pair(0, 1, row.access);
      for (const int trials : {2, 1}) {
        std::atomic<int> before[3];
        for (int r = 0; r < 3; ++r) before[r] = world.launcher(r)->trials.load();
        with_executors(world, [&](DeviceRank& one) {
          EXPECT_EQ(world.launcher(one.rank)->trials - before[one.rank], trials * int(kTrialEpochs));
          const PeerMappings& mappings = one.executor->resources().mappings();
          for (int peer = 0; peer < 3; ++peer) {
            const bool apart = peer + one.rank == 1;
            EXPECT_EQ(mappings.peer(peer).kind == ShareKind::kHost, apart) << peer << one.rank;
            EXPECT_EQ(contains(mappings.peer(peer).why_not_better, row.reason), apart)
                << mappings.peer(peer).why_not_better;
          }
          EXPECT_EQ(first_sum(one), "");
        });
      }
    }
  }
}

TEST(DeviceTrial, ALateRankIsNotTakenForAPairThatHangs) {
  DeviceWorld world({.ranks = 3});
  world.launcher(1)->delay = 2 * world.options(1).timeout;
  with_executors(world, [&](DeviceRank& one) {
    EXPECT_EQ(world.launcher(one.rank)->trials, int(kTrialEpochs));
    EXPECT_EQ(one.executor->resources().mappings().fallbacks(), "");
    EXPECT_EQ(first_sum(one), "");
  });
}

/// All ranks take the same decision, and the next try of a group would take it too.
TEST(DeviceTrial, AKernelThatComputesOtherBitsThanTheHostIsNotUsed) {
  DeviceWorld world({.ranks = 2});
  world.launcher(1)->bends = kernel::DeviceAlgorithm::kReduceChunks;
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    const auto failure = failure_to_make(world, rank, bootstrap);
    ASSERT_TRUE(failure);
    EXPECT_TRUE(contains(failure->what(), "rank 1's kernel reduce_chunks of f32 computes other bits than the host"))
        << failure->what();
    EXPECT_EQ(world.launcher(rank)->trials, int(kTrialEpochs)) << "another try would not help";
  });
}

TEST(DeviceTrial, KernelsThatAreSlowOnOneRankAreUsedOnlyIfForced) {
  for (const bool insists : {false, true}) {
    DeviceWorld world({.ranks = 2, .gpus = 1, .processes = true});
    world.launcher(1)->slow = milliseconds(20);
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      SharedBootstrap bootstrap(table, rank);
      ChannelOptions options = world.options(rank);
      if (!insists) options.slowest = milliseconds(10);
      std::string text;
      try {
        (void)world.make(rank, bootstrap, options);
      } catch (const Error& error) {
        text = error.what();
        EXPECT_EQ(error.code(), Code::kInvalid);
      }
      EXPECT_EQ(contains(text, " ms: processes that share a GPU without MPS take turns on it. Next: start MPS"),
                !insists)
          << text;
      EXPECT_EQ(contains(text, "; NVX_KERNELS=1 uses kernels however slow they are"), !insists) << text;
    });
  }
}

/// Other work may delay most operations of a trial. Of processes in turns half of the operations end at once.
TEST(DeviceTrial, KernelsThatAreSometimesSlowAreUsedUnlessProcessesMayTakeTurns) {
  for (const bool shared : {false, true}) {
    DeviceWorld world({.ranks = 2, .gpus = shared ? 1 : 2, .processes = true});
    world.launcher(1)->slow = milliseconds(100);
    world.launcher(1)->most_slow = 8;
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      SharedBootstrap bootstrap(table, rank);
      ChannelOptions options = world.options(rank);
      options.timeout = milliseconds(10'000), options.slowest = milliseconds(50);
      std::string text;
      try {
        (void)world.make(rank, bootstrap, options);
      } catch (const Error& error) {
        text = error.what();
      }
      EXPECT_EQ(contains(text, "a small operation by nvx's kernels takes"), shared) << text;
    });
  }
}

/// The architecture and the driver's CUDA of each file of `scripts/gpu_evidence.py` in which all kernels were right.
std::set<std::pair<int, int>> shown_by_files() {
  std::set<std::pair<int, int>> shown;
  for (const auto& entry : std::filesystem::directory_iterator(source_root() / "bench" / "results")) {
    if (!entry.path().filename().string().starts_with("gpu_") || entry.path().extension() != ".json") continue;
    int architecture = 0, cuda = 0;
    bool right = false, wrong = false;
    for (auto& row : rows_of_file(entry.path())) {
      if (row.contains("driver_cuda")) cuda = std::stoi(row["driver_cuda"]);
      if (row.contains("compute")) architecture = int(std::lround(std::stod(row["compute"]) * 10));
      if (row["part"] == "correct" && row.contains("end")) (row["failed"] == "0" ? right : wrong) = true;
    }
    if (right && !wrong) shown.insert({architecture, cuda});
  }
  return shown;
}

TEST(DeviceTrial, KernelsHaveBeenShownWhereAResultFileShowsThem) {
  const auto shown = shown_by_files();
  EXPECT_FALSE(shown.empty());
  for (int architecture = 50; architecture <= 130; ++architecture) {
    for (int cuda = 11000; cuda <= 15000; cuda += 10)
      EXPECT_EQ(is_shown(architecture, cuda), shown.contains({architecture, cuda})) << architecture << " " << cuda;
  }
}

/// Rank 1 alone is on such a GPU. Both ranks, and two groups, are in one process. They use kernels all the same.
TEST(DeviceTrial, AProcessWarnsOnceThatKernelsHaveNotBeenShownHere) {
  DeviceWorld world({.ranks = 2, .processes = true});
  const auto log_of_two_groups = [&] {
    testing::internal::CaptureStderr();
    for (int group = 0; group < 2; ++group)
      with_executors(world, [&](DeviceRank& one) { EXPECT_EQ(first_sum(one), ""); });
    return testing::internal::GetCapturedStderr();
  };
  const std::string words = "kernels have not been tested on sm_100 (Fake GPU) with a driver for CUDA 12.8";
  EXPECT_FALSE(contains(log_of_two_groups(), "have not been tested"));
  world.process(1).driver->set_architecture(100, 12080);
  const std::string text = log_of_two_groups();
  const size_t first = text.find(words);
  ASSERT_NE(first, std::string::npos) << text;
  EXPECT_EQ(text.find("have not been tested", first + words.size()), std::string::npos) << text;
}

/// No rank of the group can use kernels, and each knows why rank 1 cannot.
void expect_refused_on_all(DeviceWorld& world, int ranks, const std::string& why) {
  MemoryStore store;
  as_threads(ranks, [&](int rank) {
    StoreBootstrap bootstrap(store, {.prefix = "here", .rank = rank, .ranks = ranks});
    const auto failure = failure_to_make(world, rank, bootstrap);
    ASSERT_TRUE(failure);
    EXPECT_TRUE(contains(failure->what(), why)) << failure->what();
  });
}

TEST(DeviceTrial, ARefusedLaunchIsReportedToAll) {
  DeviceWorld world({.ranks = 3, .processes = true});
  world.launcher(1)->trial_refusal = {Code::kSystem, "nvx: the device takes no launches"};
  expect_refused_on_all(world, 3, "the device takes no launches");
}

/// As an old driver, which takes few arguments only.
TEST(DeviceTrial, ARefusedLaunchOfSeveralOperationsIsReportedToAll) {
  DeviceWorld world({.ranks = 2, .processes = true});
  world.launcher(1)->refusal_of_several = {Code::kSystem, "nvx: too many arguments"};
  expect_refused_on_all(world, 2, "too many arguments");
}

/// As with CUDA_LAUNCH_BLOCKING: rank 0's first kernel waits for rank 1, which does not come to the trial.
TEST(DeviceTrial, PeersAreCheckedDuringALaunchThatBlocks) {
  DeviceWorld world({.ranks = 2, .processes = true});
  world.launcher(0)->blocks = true;
  world.launcher(1)->trial_refusal = {Code::kSystem, "nvx: the device takes no launches"};
  MemoryStore store;
  std::atomic<bool> refused{false};
  const auto began = Clock::now();
  as_threads(2, [&](int rank) {
    StoreBootstrap bootstrap(store, {.prefix = "here", .rank = rank, .ranks = 2});
    ChannelOptions options = world.options(rank);
    options.busy = milliseconds(60'000);
    options.check_peers = [&] {
      if (refused) throw Error(Code::kPeerFailed, "nvx: rank 1 has given up");
    };
    try {
      (void)world.make(rank, bootstrap, options);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), rank == 0 ? "rank 1 has given up" : "the device takes no launches"))
          << error.what();
    }
    refused = refused || rank == 1;
  });
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(30));
}

}  // namespace
}  // namespace nvx::test
