// How ranks write what others read: what is learnt from costs, and that all have the same policy in every operation.

#include "kernel/cache_policy.h"

#include <gtest/gtest.h>

#include "support/lanes.h"
#include "support/plays.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::CachePolicyRecord;

struct Costs {
  double cached;
  double past;
};
constexpr Costs kNear{4, 6}, kFar{15, 5};

/// Runs operations of these costs. Returns how many of them went past the caches.
int operate(CachePolicyRecord& record, const Costs& costs, int operations) {
  int past = 0;
  for (int i = 0; i < operations; ++i) {
    const kernel::CachePolicy next = record.next();
    past += record.now() == kernel::CachePolicy::kPast;
    record.learn(record.now() == kernel::CachePolicy::kPast ? costs.past : costs.cached);
    record.now(next);
  }
  return past;
}

TEST(CachePolicy, TheFasterWayIsFoundAndTheOtherOneSeldomTried) {
  CachePolicyRecord near, far;
  const int past = operate(near, kNear, 1000);
  EXPECT_GE(past, 20) << "never tried again";
  EXPECT_LE(past, 40);
  const int cached = 1000 - operate(far, kFar, 1000);
  EXPECT_GE(cached, 5) << "never tried again";
  EXPECT_LE(cached, 15) << "costs three times as much, so it is tried a third as often";
}

TEST(CachePolicy, AGainOfLessThanATenthIsNone) {
  CachePolicyRecord record;
  EXPECT_LE(operate(record, {4, 3.8}, 1000), 40);
}

TEST(CachePolicy, OnlyALargeDifferenceSaysThatCoresAreFar) {
  CachePolicyRecord near, even, far;
  operate(near, kNear, 100);
  operate(even, {5, 4}, 100);
  operate(far, kFar, 100);
  EXPECT_FALSE(near.far());
  EXPECT_FALSE(even.far());
  EXPECT_TRUE(far.far());
}

TEST(CachePolicy, CoresThatMoveApartAreNoticedWithinAFewOperations) {
  CachePolicyRecord record;
  operate(record, kNear, 100);
  EXPECT_GE(operate(record, kFar, 20), 10);
}

TEST(CachePolicy, CoresThatComeTogetherAreNoticedAtTheNextTrial) {
  CachePolicyRecord record;
  operate(record, kFar, 100);
  operate(record, kNear, 3 * 32 + 2);
  EXPECT_LE(operate(record, kNear, 30), 1);
}

TEST(CachePolicy, OneOperationThatWasInterruptedChangesNothing) {
  CachePolicyRecord record;
  operate(record, kNear, 100);
  record.learn(1000);
  EXPECT_LE(operate(record, kNear, 32), 2);
}

TEST(CachePolicy, ATrialThatTaughtNothingIsRepeatedButNotAtOnce) {
  CachePolicyRecord record;
  int past = 0;
  for (int i = 0; i < 100; ++i) {
    const kernel::CachePolicy next = record.next();
    past += record.now() == kernel::CachePolicy::kPast;
    if (record.now() == kernel::CachePolicy::kCached) record.learn(4);  // every trial was interrupted
    record.now(next);
  }
  EXPECT_GE(past, 5);
  EXPECT_LE(past, 15);
}

TEST(CachePolicy, RecordsAreApartByKindAndSize) {
  kernel::CachePolicies policies;
  policies.record(0, 4096).now(kernel::CachePolicy::kPast);
  EXPECT_EQ(policies.record(1, 4096).now(), kernel::CachePolicy::kCached);
  EXPECT_EQ(policies.record(0, 8192).now(), kernel::CachePolicy::kCached);
  EXPECT_EQ(policies.record(0, 5000).now(), kernel::CachePolicy::kPast);
  EXPECT_EQ(policies.record(0, SIZE_MAX).now(), kernel::CachePolicy::kCached);
}

/// Each rank's choice must be the leader's, or a rank is slow by the others' policy and takes it for its own.
TEST(CachePolicy, AllRanksGoTheSameWayInEveryOperation) {
  if (!kernel::level().copy_past) GTEST_SKIP() << "this build has one policy only";
  constexpr int kRanks = 3, kOperations = 200;
  constexpr size_t kCount = 4000;
  Lanes lanes(kRanks);
  std::vector<std::vector<kernel::CachePolicy>> gone(kRanks);
  as_threads(kRanks, [&](int rank) {
    for (int i = 0; i < kOperations; ++i) {
      const Play play{.collective = kernel::Collective::kAllReduce, .counts = {kCount}, .round = uint64_t(i + 1)};
      Side side(play, rank, kRanks);
      const WaitRules rules = rules_of(std::chrono::seconds(20));
      CpuExec ex(side.width(), kernel::level().reduce(play.dtype, play.op), lanes[rank].factors().data(), rules);
      kernel::Work work = side.work();
      work.bytes = kCount * side.width();
      const kernel::Algorithm algorithm = kernel::Algorithm::kReduceOneShot;
      gone[size_t(rank)].push_back(lanes[rank].cache_policies().record(size_t(algorithm), work.bytes).now());
      ASSERT_TRUE(launch_cpu(algorithm, ex, lanes[rank], work));
      ASSERT_EQ(side.verdict(), "");
    }
  });
  EXPECT_EQ(gone[1], gone[0]);
  EXPECT_EQ(gone[2], gone[0]);
  EXPECT_NE(std::count(gone[0].begin(), gone[0].end(), kernel::CachePolicy::kPast), 0) << "both are tried";
}

}  // namespace
}  // namespace nvx::test
