// The monitored barrier after a rank has missed one: ranks that try again complete it, and it works as before.

#include <gtest/gtest.h>

#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

constexpr int kMembers = 3;
constexpr int kMissing = 1;

/// The ranks are on one host, or rank 0 and another rank are on one host each.
class Monitored : public testing::TestWithParam<std::vector<int>> {
 protected:
  GroupOptions options(int rank) {
    return GetParam().back() == 0 ? test::options("monitored", rank, kMembers) : hosts_.options("monitored", rank);
  }
  Hosts hosts_{GetParam()};
  MemoryStore store_;
};
INSTANTIATE_TEST_SUITE_P(HostOf, Monitored,
                         testing::Values(std::vector{0, 0, 0}, std::vector{0, 0, 1}, std::vector{0, 1, 1}));

Status try_again(Group& group, milliseconds timeout) {
  constexpr int kTries = 20;
  Status status;
  for (int tries = 0; tries < kTries; ++tries) {
    status = group.monitored_barrier(timeout, /*name_all=*/true);
    if (status.ok()) break;
  }
  return status;
}

TEST_P(Monitored, RankThatMissedABarrierJoinsTheNext) {
  std::atomic<bool> missed{false};
  std::atomic<int> come{0};
  as_threads(kMembers, [&](int rank) {
    Group group(store_, options(rank));
    if (rank == 0) {
      const Status status = group.monitored_barrier(milliseconds(300), /*name_all=*/false);
      EXPECT_CONTAINS(status, "Rank 1 failed to pass monitoredBarrier");
      missed = true;
    }
    EXPECT_TRUE(rank != kMissing || eventually(milliseconds(20'000), [&] { return missed.load(); }));
    const Status again = try_again(group, milliseconds(rank == 0 ? 500 : 10'000));
    EXPECT_TRUE(again.ok()) << again.what();
    for (int round = 1; round <= 3; ++round) {
      if (rank == round % kMembers) std::this_thread::sleep_for(milliseconds(50));
      ++come;
      const Status status = group.monitored_barrier(milliseconds(10'000), /*name_all=*/true);
      EXPECT_TRUE(status.ok()) << status.what();
      EXPECT_GE(come.load(), round * kMembers);
    }
  });
}

/// A rank that waits in one call takes part in each barrier that rank 0 begins meanwhile.
TEST_P(Monitored, WaitingRankJoinsEachBarrierOfRank0) {
  std::atomic<int> failed{0};
  as_threads(kMembers, [&](int rank) {
    Group group(store_, options(rank));
    if (rank == kMissing) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return failed >= 3; }));
    }
    if (rank != 0) {
      const Status status = group.monitored_barrier(milliseconds(20'000), /*name_all=*/true);
      EXPECT_TRUE(status.ok()) << status.what();
      return;
    }
    for (int tries = 0; tries < 40; ++tries) {
      const Status status = group.monitored_barrier(milliseconds(200), /*name_all=*/true);
      if (status.ok()) return;
      EXPECT_CONTAINS(status, "failed to pass");
      ++failed;
    }
    ADD_FAILURE() << "rank 0 never had them all";
  });
}

/// The waiter sleeps on a flag in the memory of a peer, which may reuse it once this rank has left.
TEST_P(Monitored, ARankLeavesAfterItsBarrierHasEnded) {
  as_threads(kMembers, [&](int rank) {
    Group group(store_, options(rank));
    if (rank != 0) return (void)eventually(milliseconds(300), [] { return false; });
    std::thread waiter([&] { EXPECT_FALSE(group.monitored_barrier(milliseconds(60'000), /*name_all=*/true).ok()); });
    std::this_thread::sleep_for(milliseconds(100));
    group.leave();
    const Members& members = group.core().members;
    for (int s = 0; s < members.local_ranks(); ++s) EXPECT_EQ(members.pad(s).header().monitored_in.flag.sleepers, 0u);
    waiter.join();
  });
}

Group* left_by_the_handler = nullptr;

/// leave() waits for the barriers of other threads also when this thread is in a barrier of another group.
TEST(MonitoredBarrier, AHandlerInABarrierLeavesAnotherGroupAfterItsBarrier) {
  MemoryStore store;
  std::atomic<bool> done{false};
  std::thread peer([&] {
    Group one(store, options("one", 1, 2)), other(store, options("other", 1, 2));
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return done.load(); }));
  });
  Group one(store, options("one", 0, 2)), other(store, options("other", 0, 2));
  std::thread waiter([&] { EXPECT_FALSE(other.monitored_barrier(milliseconds(60'000), /*name_all=*/true).ok()); });
  std::this_thread::sleep_for(milliseconds(100));
  left_by_the_handler = &other;
  interrupt_check = [] {
    if (Group* const group = std::exchange(left_by_the_handler, nullptr)) {
      group->leave();
      EXPECT_EQ(group->core().members.pad(1).header().monitored_in.flag.sleepers, 0u);
    }
    return false;
  };
  EXPECT_FALSE(one.monitored_barrier(milliseconds(1000), /*name_all=*/true).ok());
  interrupt_check = nullptr;
  EXPECT_EQ(left_by_the_handler, nullptr) << "the handler did not run";
  done = true;
  waiter.join();
  peer.join();
}

}  // namespace
}  // namespace nvx::test
