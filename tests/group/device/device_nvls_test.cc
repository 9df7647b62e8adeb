// NVX_NVLS=1: which operations the switch adds, and how a group does without it.

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "support/kernel_executors.h"
#include "support/sizes.h"
#include "support/ways.h"

namespace nvx::test {
namespace {

using kernel::DeviceAlgorithm;

constexpr size_t kMany = 20'000;  // more than one trip of packets serves
constexpr int kAllTrials = int(kTrialEpochs + kMulticastTrialEpochs);

DeviceWorld::Shape shape(int ranks) { return {.ranks = ranks, .processes = true, .arena = 24 * M}; }

void request_it(ChannelOptions& options) {
  options.multicast_bytes = 2 * M;
  options.tuning.set(Tune::kOneShot, 1000);
}

template <class... Some>
std::vector<Operation> list(Some... some) {
  std::vector<Operation> operations;
  (operations.push_back(std::move(some)), ...);
  return operations;
}

/// Numbers whose sums are exact, so that any order of additions has the same bits.
std::vector<float> whole_numbers(int rank) {
  std::vector<float> data(kMany);
  for (size_t i = 0; i < kMany; ++i) data[i] = float(i % 97) + float(1000 * rank);
  return data;
}
bool is_sum(const std::vector<float>& data, int ranks) {
  for (size_t i = 0; i < kMany; ++i) {
    if (data[i] != float(size_t(ranks) * (i % 97)) + float(1000 * ranks * (ranks - 1) / 2)) return false;
  }
  return true;
}

void expect_right_sum(DeviceRank& one) {
  std::vector<float> data = whole_numbers(one.rank);
  std::vector<Operation> operations = list(all_reduce(data, DType::kF32));
  ASSERT_TRUE(one.launch(operations).ok());
  ASSERT_TRUE(one.await().ok()) << one.await().what();
  EXPECT_TRUE(is_sum(data, one.world.ranks()));
}

TEST(DeviceNvls, TheSwitchAddsSumsOfItsTypesThatOneTripDoesNotServe) {
  DeviceWorld world(shape(3));
  with_executors(
      world,
      [&](DeviceRank& one) {
        EXPECT_EQ(world.launcher(one.rank)->trials, kAllTrials);
        EXPECT_EQ(one.executor->launched(), one.executor->finished());
        expect_right_sum(one);
        EXPECT_EQ(world.launcher(one.rank)->by_switch, 1);
        EXPECT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 3, 1)}), "") << "one trip of packets";
        Spec average = spec_of(Collective::kAllReduce, kMany, 3, 1);
        average.op = ReduceOp::kAvg;
        EXPECT_EQ(one.perform({average, spec_of(Collective::kAllGather, kMany, 3, 1)}), "");
        EXPECT_EQ(world.launcher(one.rank)->by_switch, 1);
        std::vector<float> data(kMany);
        Operation o = all_reduce(data, DType::kF32);
        for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
          o.dtype = dtype, o.op = ReduceOp::kSum;
          EXPECT_EQ(one.executor->choose(o).algorithm, DeviceAlgorithm::kReduceMulticast);
        }
        o.dtype = DType::kF64;
        EXPECT_NE(one.executor->choose(o).algorithm, DeviceAlgorithm::kReduceMulticast);
      },
      request_it);
}

TEST(DeviceNvls, HasALaunchOfItsOwnBetweenOthersAndInGraphs) {
  DeviceWorld world(shape(2));
  with_executors(
      world,
      [&](DeviceRank& one) {
        const int before = world.launcher(one.rank)->launches;
        std::vector<int32_t> first(10, 1), last(10, 2);
        std::vector<float> a = whole_numbers(one.rank), b = whole_numbers(one.rank);
        std::vector<Operation> operations =
            list(all_reduce(first), all_reduce(a, DType::kF32), all_reduce(b, DType::kF32), all_reduce(last));
        ASSERT_TRUE(one.launch(operations).ok());
        ASSERT_TRUE(one.await().ok()) << one.await().what();
        EXPECT_EQ(world.launcher(one.rank)->launches - before, 4);
        EXPECT_EQ(world.launcher(one.rank)->by_switch, 2);
        EXPECT_EQ(first, std::vector<int32_t>(10, 2));
        EXPECT_EQ(last, std::vector<int32_t>(10, 4));
        EXPECT_TRUE(is_sum(a, 2) && is_sum(b, 2));
        std::vector<float> data = whole_numbers(one.rank);
        std::vector<Operation> captured = list(all_reduce(data, DType::kF32));
        ASSERT_TRUE(one.capture(captured).ok());
        for (int replay = 0; replay < 2; ++replay) {
          std::ranges::copy(whole_numbers(one.rank), data.begin());  // at its address in the graph
          one.replay();
          EXPECT_TRUE(eventually(std::chrono::seconds(30), [&] { return one.stream.idle(); }));
          EXPECT_TRUE(is_sum(data, 2));
        }
      },
      request_it);
}

/// Kernels serve a group without the switch, and the reason is logged once. `trials`: how many kernels each rank tried.
void expect_without(DeviceWorld& world, int trials, const std::string& why) {
  testing::internal::CaptureStderr();
  with_executors(
      world,
      [&](DeviceRank& one) {
        EXPECT_EQ(world.launcher(one.rank)->trials, trials);
        EXPECT_EQ(one.executor->resources().multicast().bytes, 0u);
        expect_right_sum(one);
        EXPECT_EQ(world.launcher(one.rank)->by_switch, 0);
      },
      request_it);
  const std::string text = testing::internal::GetCapturedStderr(), words = "group g: NVX_NVLS=1 has no effect: ";
  const size_t at = text.find(words);
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_TRUE(contains(text, why)) << text;
  EXPECT_EQ(text.find(words, at + 1), std::string::npos) << "once: " << text;
}

TEST(DeviceNvls, ADriverThatRefusesLeavesTheGroupItsKernels) {
  DeviceWorld world(shape(3));
  world.process(1).driver->refuse("bind_multicast", 3);
  expect_without(world, int(kTrialEpochs), "rank 1: cuMulticastBindMem on GPU 1: fake refusal 3");
}

TEST(DeviceNvls, RanksOfOneProcessDoWithoutIt) {
  DeviceWorld world({.ranks = 2, .arena = 24 * M});
  expect_without(world, int(kTrialEpochs), "the ranks do not share virtual memory, but memory by pointer");
}

TEST(DeviceNvls, ASwitchThatAddsWronglyIsNotUsed) {
  DeviceWorld world(shape(3));
  world.launcher(2)->adds_wrongly = true;
  expect_without(world, kAllTrials, "the switch's sums on rank 0 are wrong");
}

TEST(DeviceNvls, SumsThatDifferBetweenRanksAreNotUsed) {
  DeviceWorld world(shape(2));
  world.launcher(1)->bends = DeviceAlgorithm::kReduceMulticast;  // the last bit, which rounding would explain
  expect_without(world, kAllTrials, "the switch's sums on rank 1 are not those of rank 0");
}

TEST(DeviceNvls, AKernelThatHangsInItIsTriedOnce) {
  DeviceWorld world(shape(2));
  world.launcher(1)->hangs_in_switch = true;
  expect_without(world, kAllTrials + int(kTrialEpochs), "that uses multicast did not end");
}

/// The driver gets no call about multicast.
TEST(DeviceNvls, IsOffByDefault) {
  DeviceWorld world(shape(2));
  with_executors(world, [&](DeviceRank& one) {
    EXPECT_EQ(world.process(one.rank).driver->calls_of("multicast_granularity"), 0);
    EXPECT_EQ(world.launcher(one.rank)->trials, int(kTrialEpochs));
    expect_right_sum(one);
    EXPECT_EQ(world.launcher(one.rank)->by_switch, 0);
  });
}

/// Groups come and go: parts are used again once all ranks have gone.
TEST(DeviceNvls, PartsAreReturnedToTheArena) {
  DeviceWorld world(shape(2));
  for (int group = 0; group < 6; ++group) {
    with_executors(
        world,
        [&](DeviceRank& one) {
          EXPECT_NE(one.executor->resources().multicast().bytes, 0u) << group;
          expect_right_sum(one);
        },
        [](ChannelOptions& options) {
          request_it(options);
          options.peers_gone = [] { return true; };  // with this rank's last sum, their kernels have read all parts
        });
  }
}

}  // namespace
}  // namespace nvx::test
