// How ranks write data that others read: the costs that they record, and that all ranks use the same policy in each
// operation.

#include "kernel/reduce/cache_policy.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "kernel/cpu/own_time.h"
#include "support/channels.h"
#include "support/ranks.h"
#include "support/specs.h"

namespace nvx::test {
namespace {

using kernel::CachePolicy;
using kernel::CachePolicyRecord;

struct Costs {
  double cached;
  double past;
};
constexpr Costs kNear{4, 6}, kFar{15, 5};

/// Runs operations with these costs. Returns how many of them bypassed the caches.
int operate(CachePolicyRecord& record, const Costs& costs, int operations) {
  int past = 0;
  for (int i = 0; i < operations; ++i) {
    const CachePolicy next = record.next();
    past += record.now() == CachePolicy::kPast;
    record.add(record.now() == CachePolicy::kPast ? costs.past : costs.cached);
    record.now(next);
  }
  return past;
}

TEST(CachePolicy, TheFasterPolicyIsFoundAndTheOtherSeldomTried) {
  CachePolicyRecord near, far;
  operate(near, kNear, 1000);
  operate(far, kFar, 1000);
  const int past = operate(near, kNear, 10'000);
  EXPECT_GE(past, 30) << "never tried again";
  EXPECT_LE(past, 50) << "trials show in the 99th percentile";
  const int cached = 10'000 - operate(far, kFar, 10'000);
  EXPECT_GE(cached, 10) << "never tried again";
  EXPECT_LE(cached, 17) << "costs three times as much, so it is tried a third as often";
}

TEST(CachePolicy, AGainOfLessThanATenthIsNone) {
  CachePolicyRecord record;
  EXPECT_LE(operate(record, {4, 3.8}, 1000), 20);
}

TEST(CachePolicy, CoresThatShareACacheNoLongerAreNoticedWithinAFewOperations) {
  CachePolicyRecord record;
  operate(record, kNear, 10'000);
  EXPECT_GE(operate(record, kFar, 20), 10);
}

TEST(CachePolicy, CoresThatBeginToShareACacheAreNoticedAtTheNextTrial) {
  CachePolicyRecord record;
  operate(record, kFar, 10'000);
  operate(record, kNear, 3 * 256 + 2);
  EXPECT_LE(operate(record, kNear, 200), 1);
}

TEST(CachePolicy, OneOperationThatWasInterruptedChangesNothing) {
  CachePolicyRecord record;
  operate(record, kNear, 100);
  record.add(1000);
  EXPECT_LE(operate(record, kNear, 32), 2);
}

TEST(CachePolicy, AnInconclusiveTrialIsRepeatedLater) {
  CachePolicyRecord record;
  int past = 0;
  for (int i = 0; i < 100; ++i) {
    const CachePolicy next = record.next();
    past += record.now() == CachePolicy::kPast;
    if (record.now() == CachePolicy::kCached) record.add(4);  // every trial was interrupted
    record.now(next);
  }
  EXPECT_GE(past, 5);
  EXPECT_LE(past, 15);
}

/// How often the scheduler has interrupted this thread.
long interruptions() {
  rusage now{};
  getrusage(RUSAGE_THREAD, &now);
  return now.ru_nivcsw;
}

/// Two threads on one core, so that each interrupts the other.
TEST(OwnTime, DoesNotCountWorkThatLostItsCore) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const int here = sched_getcpu();
  std::atomic<bool> over{false};
  const auto stay = [here] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(here, &one);
    return sched_setaffinity(0, sizeof one, &one) == 0;
  };
  std::thread rival([&] {
    if (!stay()) return;
    while (!over.load(std::memory_order_relaxed)) {
    }
  });
  int counted = 0, left_out = 0;
  bool stays = true;
  std::thread worker([&] {
    stays = stay();
    for (const auto end = Clock::now() + std::chrono::seconds(20);
         stays && Clock::now() < end && (left_out < 3 || counted == 0);) {
      const long before = interruptions();
      const kernel::OwnTime time(1 << 20), of_little(1 << 10);
      for (const auto stop = Clock::now() + std::chrono::microseconds(300); Clock::now() < stop;) {
      }
      const auto spent = time.spent();
      const bool interrupted = interruptions() != before;
      EXPECT_TRUE(of_little.spent().has_value()) << "a measurement costs more than it would gain";
      EXPECT_TRUE(interrupted || spent.has_value());
      EXPECT_GE(spent.value_or(std::chrono::seconds(1)), std::chrono::microseconds(300));
      (spent ? counted : left_out) += 1;
    }
  });
  worker.join();
  over = true;
  rival.join();
  if (!stays) GTEST_SKIP() << "threads may not choose their core here";
  EXPECT_GE(left_out, 3);
  EXPECT_GT(counted, 0);
}

TEST(CachePolicy, EachKindAndSizeHasARecordOfItsOwn) {
  kernel::CachePolicies policies;
  EXPECT_EQ(policies.record(40, 4096).now(), CachePolicy::kCached);
  policies.record(0, 4096).now(CachePolicy::kPast);
  EXPECT_EQ(policies.record(1, 4096).now(), CachePolicy::kCached);
  EXPECT_EQ(policies.record(0, 8192).now(), CachePolicy::kCached);
  EXPECT_EQ(policies.record(0, 5000).now(), CachePolicy::kPast);
  EXPECT_EQ(policies.record(0, SIZE_MAX).now(), CachePolicy::kCached);
}

/// Runs the spec repeatedly. Returns the policy of each rank and run.
std::vector<std::vector<CachePolicy>> policies_of(int ranks, const Spec& of_all, kernel::Algorithm algorithm) {
  Channels channels(ranks);
  std::vector<std::vector<CachePolicy>> policies{size_t(ranks)};
  as_threads(ranks, [&](int rank) {
    Spec spec = of_all;
    for (int i = 0; i < 200; ++i) {
      spec.round = uint64_t(i + 1);
      Side side(spec, rank, ranks);
      const WaitRules rules = rules_of(std::chrono::seconds(20));
      CpuExec ex(side.width(), kernel::level().reduce(spec.dtype, spec.op), channels[rank].factors().data(), rules);
      kernel::CollectiveArgs args = side.args();
      args.bytes = spec.counts[0] * side.width();
      ASSERT_TRUE(run_on_cpu(algorithm, ex, channels[rank], args));
      policies[size_t(rank)].push_back(ex.stages_past() ? CachePolicy::kPast : CachePolicy::kCached);
      ASSERT_EQ(side.verdict(), "");
    }
  });
  return policies;
}

bool tries_both(const std::vector<CachePolicy>& policies) {
  const auto past = std::count(policies.begin(), policies.end(), CachePolicy::kPast);
  return past != 0 && past != std::ptrdiff_t(policies.size());
}

/// Each rank must follow the leader, or it would be slow because of the others' policy and attribute that to its own.
TEST(CachePolicy, AllRanksUseTheSamePolicyInEveryOperation) {
  if (!kernel::level().copy_past) GTEST_SKIP() << "this build has one policy only";
  for (const HostAlgorithm& row : kHostAlgorithms) {
    if (row.through == Through::kFlags || (is_rooted(row.collective) && !row.waits_for_all)) continue;
    const Spec spec{
        .collective = row.collective, .root = is_rooted(row.collective) ? 1 : -1, .counts = {4000, 4000, 4000}};
    const auto policies = policies_of(3, spec, row.algorithm);
    EXPECT_EQ(policies[1], policies[0]) << name(row.algorithm) << ": " << describe(spec);
    EXPECT_EQ(policies[2], policies[0]) << name(row.algorithm) << ": " << describe(spec);
    EXPECT_TRUE(tries_both(policies[0])) << name(row.algorithm) << ": " << describe(spec);
  }
}

/// A rank that only writes bears the cost, and decides for itself.
TEST(CachePolicy, AroundARootTheWriterDecides) {
  if (!kernel::level().copy_past) GTEST_SKIP() << "this build has one policy only";
  using kernel::Algorithm;
  using kernel::Collective;
  struct Case {
    Collective collective;
    Algorithm algorithm;
    bool root_writes;
  };
  for (const Case& c : {Case{Collective::kReduce, Algorithm::kReduceOneShot, false},
                        Case{Collective::kBroadcast, Algorithm::kPublishOneShot, true},
                        Case{Collective::kBroadcast, Algorithm::kPublishPipelined, true}}) {
    for (const int root : {0, 1}) {
      const Spec spec{.collective = c.collective, .root = root, .counts = {4000}};
      const int writer = c.root_writes ? root : 1 - root;
      const auto policies = policies_of(2, spec, c.algorithm);
      EXPECT_TRUE(tries_both(policies[size_t(writer)])) << describe(spec);
      EXPECT_FALSE(tries_both(policies[size_t(1 - writer)])) << describe(spec) << ": a reader has recorded a cost";
    }
  }
  for (const Collective collective : {Collective::kGather, Collective::kScatter}) {
    const Spec spec{.collective = collective, .root = 1, .counts = {4000, 4000}};
    const auto policies = policies_of(2, spec, Algorithm::kExchange);
    EXPECT_TRUE(tries_both(policies[collective == Collective::kScatter ? 1 : 0])) << describe(spec);
  }
}

TEST(CachePolicy, WriterCountsItsReadersCost) {
  CachePolicyRecord record;
  for (int i = 0; i < 100; ++i) {
    record.now(record.next());
    record.add_write(record.now() == CachePolicy::kPast ? 8 : 10);
  }
  EXPECT_EQ(record.best(), CachePolicy::kCached) << "what the writer saves, its readers lose";
  for (int i = 0; i < 100; ++i) {
    record.now(record.next());
    record.add_write(record.now() == CachePolicy::kPast ? 4 : 40);
  }
  EXPECT_EQ(record.best(), CachePolicy::kPast);
}

}  // namespace
}  // namespace nvx::test
