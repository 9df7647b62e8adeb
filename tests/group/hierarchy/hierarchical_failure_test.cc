// Errors of a group over several hosts: which rank is named, how soon, and which calls still work.

#include <gtest/gtest.h>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

const std::vector<int> kTwoOfTwo{0, 0, 1, 1};

Spec spec_of(Collective collective, size_t n, int ranks, int root = -1) {
  return {
      .collective = collective, .dtype = DType::kI32, .root = root, .counts = std::vector<size_t>(size_t(ranks), n)};
}

/// Fails the test if a scope takes too long. Sanitizers and emulators get several times the limit.
class Within {
 public:
  explicit Within(milliseconds most) : most_(why_no_processes() || is_sanitized() ? 10 * most : most) {}
  ~Within() { EXPECT_LT(Clock::now() - began_, most_); }

 private:
  const milliseconds most_;
  const Clock::time_point began_ = Clock::now();
};

class InterHostSizes : public testing::TestWithParam<size_t> {};
/// Large sizes are left out under ThreadSanitizer and in an emulator, where they take seconds.
INSTANTIATE_TEST_SUITE_P(Elements, InterHostSizes,
                         testing::ValuesIn(why_no_processes() ? std::vector<size_t>{10}
                                                              : std::vector<size_t>{10, 400'000}));

TEST_P(InterHostSizes, ARankThatDiesIsNamedOnAllHosts) {
  Hosts hosts({0, 1, 1, 2});
  std::atomic<int> past{0}, over{0};
  hosts.in_group("dies", [&](Group& group, int rank) {
    ASSERT_EQ(perform(group, spec_of(Collective::kAllReduce, GetParam(), 4)), "");
    ++past;  // a rank that dies loses the data it has in flight, so all must have their sums
    if (rank == 3) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return past == 4; }));
      hosts.net().kill(3);
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return over == 3; }));
      return;
    }
    {
      const Within time(milliseconds(3000));
      const Status status = run(group, spec_of(Collective::kAllReduce, GetParam(), 4));
      ASSERT_FALSE(status.ok());
      EXPECT_TRUE(status.code() == Code::kPeerDied || status.code() == Code::kPeerFailed) << status.what();
      EXPECT_CONTAINS(status, "rank 3 (pid");
      EXPECT_CONTAINS(status, "host2");
    }
    ++over;
  });
}

TEST_P(InterHostSizes, ACutIsNamedAndTheProcessGoesOnInAnotherGroup) {
  Hosts hosts({0, 1});
  MemoryStore store, again;
  std::atomic<int> past{0};
  as_threads(2, [&](int rank) {
    {
      Group group(store, hosts.options("cut", rank));
      ASSERT_EQ(perform(group, spec_of(Collective::kBroadcast, GetParam(), 2, 0)), "");
      ASSERT_TRUE(barrier(group).ok());
      ++past;  // data in flight at the cut is lost, so both must have passed the barrier
      if (rank == 0) {
        EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return past == 2; }));
        hosts.net().cut(0, 1);
      }
      const Within time(milliseconds(3000));
      const Status status = run(group, spec_of(Collective::kAllReduce, GetParam(), 2));
      ASSERT_FALSE(status.ok());
      EXPECT_CONTAINS(status, rank == 0 ? "rank 1 (pid" : "rank 0 (pid");
    }
    Group group(again, hosts.options("again", rank));
    EXPECT_EQ(perform(group, spec_of(Collective::kAllReduce, GetParam(), 2)), "");
    EXPECT_TRUE(barrier(group).ok());
  });
}

TEST_P(InterHostSizes, AMismatchNamesBothSidesOnAllHosts) {
  Hosts hosts(kTwoOfTwo);
  hosts.in_group("mismatch", [&](Group& group, int rank) {
    Spec spec = spec_of(Collective::kAllReduce, GetParam(), 4);
    if (rank >= 2) spec.op = ReduceOp::kMax;
    const Within time(milliseconds(4000));
    const Status status = run(group, spec);
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed) << status.what();
    EXPECT_CONTAINS(status, "collective mismatch in group mismatch");
    EXPECT_CONTAINS(status, "all_reduce(sum, i32");
    EXPECT_CONTAINS(status, "all_reduce(max, i32");
    EXPECT_CONTAINS(status, "host0");
    EXPECT_CONTAINS(status, "host1");
  });
}

/// The error comes from this operation or, on a rank that has already returned, from its next one.
TEST_P(InterHostSizes, AnotherRootIsAMismatchByTheNextOperation) {
  Hosts hosts({0, 1});
  hosts.in_group("roots", [&](Group& group, int rank) {
    const Within time(milliseconds(4000));
    Status status = run(group, spec_of(Collective::kBroadcast, GetParam(), 2, rank));
    if (status.ok()) status = barrier(group);
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "collective mismatch");
    EXPECT_CONTAINS(status, "root 0)");
    EXPECT_CONTAINS(status, "root 1)");
    EXPECT_CONTAINS(status, "): their roots differ");
  });
}

TEST_P(InterHostSizes, AnotherCollectiveIsAMismatch) {
  Hosts hosts(kTwoOfTwo);
  hosts.in_group("others", [&](Group& group, int rank) {
    const Within time(milliseconds(4000));
    const Collective mine = rank < 2 ? Collective::kReduceScatter : Collective::kAllGather;
    Status status = run(group, spec_of(mine, GetParam(), 4));
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "collective mismatch");
    EXPECT_CONTAINS(status, "reduce_scatter(");
    EXPECT_CONTAINS(status, "all_gather(");
  });
}

/// The skipped scatter has no step inside the first host, so its ranks exchange nothing in it.
TEST_P(InterHostSizes, ACallThatARankOfTheSameHostHasSkippedIsAMismatch) {
  Hosts hosts(kTwoOfTwo);
  hosts.in_group("skips", [&](Group& group, int rank) {
    const Within time(milliseconds(4000));
    Status status;
    if (rank != 0) status = run(group, spec_of(Collective::kScatter, GetParam(), 4, /*root=*/2));
    if (status.ok()) status = run(group, spec_of(Collective::kScatter, GetParam(), 4, /*root=*/0));
    EXPECT_TRUE(rank != 1 || !status.ok());
    if (status.ok()) status = barrier(group);
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "collective mismatch");
  });
}

TEST_P(InterHostSizes, OtherSplitSizesAreReportedPairByPair) {
  for (const Collective collective : {Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    Hosts hosts({0, 1});
    hosts.in_group("splits", [&](Group& group, int rank) {
      const bool all = collective == Collective::kAllToAll;
      Spec spec = spec_of(collective, GetParam(), 2, all ? -1 : 0);
      if (rank == 1) spec.counts = {GetParam() + 1, GetParam() + 1};
      const Within time(milliseconds(4000));
      Status status = run(group, spec);
      if (status.ok()) status = barrier(group);
      ASSERT_FALSE(status.ok()) << describe(spec);
      EXPECT_CONTAINS(status, std::to_string(GetParam() * 4) + " bytes");
      EXPECT_CONTAINS(status, std::to_string(GetParam() * 4 + 4) + " bytes");
    });
  }
}

TEST_P(InterHostSizes, RankThatLeavesWhileAwaitedIsNamed) {
  Hosts hosts({0, 1, 1});
  hosts.in_group("left", [&](Group& group, int rank) {
    ASSERT_EQ(perform(group, spec_of(Collective::kAllReduce, GetParam(), 3)), "");
    if (rank == 0) return;
    const Within time(milliseconds(4000));
    const Status status = run(group, spec_of(Collective::kAllReduce, GetParam(), 3));
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "rank 0 (pid");
    EXPECT_CONTAINS(status, "destroyed");
  });
}

/// Leaving right after the last operation is no failure on any rank.
TEST(HierarchicalFailure, LeavingAfterTheLastOperationIsNone) {
  Hosts hosts({0, 0, 1, 2});
  for (int round = 0; round < 15; ++round) {
    hosts.in_group("last", [&](Group& group, int) {
      ASSERT_EQ(perform(group, spec_of(Collective::kAllReduce, round % 2 ? 50'000 : 100, 4)), "");
      ASSERT_EQ(perform(group, spec_of(Collective::kBroadcast, 3000, 4, round % 4)), "");
    });
  }
}

TEST(HierarchicalFailure, AbortReachesAllRanksOfAllHosts) {
  Hosts hosts({0, 0, 1, 1, 2, 2});
  std::atomic<int> over{0};
  hosts.in_group("aborted", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      group.abort("because the test says so");
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return over == 5; }));
      return;
    }
    {
      const Within time(milliseconds(2200));
      const Status status = run(group, spec_of(Collective::kAllReduce, 100'000, 6));
      ASSERT_FALSE(status.ok());
      EXPECT_CONTAINS(status, "was aborted on rank 1");
      EXPECT_CONTAINS(status, "because the test says so");
    }
    ++over;
  });
}

/// The program may see a failure, and leave, while another thread still reports it.
TEST(HierarchicalFailure, AFailureIsReportedBeforeItsRankLeaves) {
  Hosts hosts({0, 1});
  hosts.in_group("reported", [&](Group& group, int rank) {
    const auto slowly = [](const Status&) { std::this_thread::sleep_for(milliseconds(300)); };
    if (rank == 0) group.core().failures.on_failure(slowly);
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 0) {
      std::thread aborts([&] { group.abort("because the test says so"); });
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return group.failed(); }));
      group.leave();
      aborts.join();
      return;
    }
    const Status status = run(group, spec_of(Collective::kAllReduce, 100, 2));
    EXPECT_CONTAINS(status, "was aborted on rank 0");
  });
}

/// A rank that waits for a busy rank of its own host also sees the abort.
TEST(HierarchicalFailure, AbortReachesARankThatWaitsForABusyOne) {
  Hosts hosts(kTwoOfTwo);
  std::atomic<bool> over{false};
  hosts.in_group("busy", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(200));
      group.abort("early");
    }
    if (rank != 3) {
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return over.load(); }));
      return;
    }
    group.set_timeout(milliseconds(5000));
    {
      const Within time(milliseconds(2200));
      const Status status = barrier(group);
      ASSERT_FALSE(status.ok());
      EXPECT_CONTAINS(status, "was aborted on rank 0");
    }
    over = true;
  });
}

TEST_P(InterHostSizes, ATimeoutNamesTheMissingAndItsHost) {
  Hosts hosts({0, 0, 1, 2});
  std::atomic<int> waiting{3};
  hosts.in_group("timeout", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());  // the ranks call at about the same time, so each reports soon after the first
    if (rank == 3) {
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return waiting == 0; }));
      return;
    }
    group.set_timeout(milliseconds(why_no_processes() ? 2000 : 1000));
    {
      const Within time(milliseconds(3000));
      const Status status = run(group, spec_of(Collective::kAllReduce, GetParam(), 4));
      ASSERT_FALSE(status.ok());
      EXPECT_TRUE(status.code() == Code::kTimeout || status.code() == Code::kPeerFailed) << status.what();
      EXPECT_CONTAINS(status, "timed out in all_reduce");
      EXPECT_CONTAINS(status, "rank 3 (pid");
      EXPECT_CONTAINS(status, "host2");
    }
    --waiting;
  });
}

/// The rank that times out first waits for a rank that itself waits, and whose time is not up. That rank reports
/// which rank it waits for.
TEST(HierarchicalFailure, ATimeoutDoesNotNameARankThatWaitsItself) {
  Hosts hosts({0, 1, 1});
  std::atomic<int> waiting{2};
  hosts.in_group("chain", [&](Group& group, int rank) {
    if (rank == 2) {
      EXPECT_TRUE(eventually(milliseconds(60'000), [&] { return waiting == 0; }));
      return;
    }
    // This leaves enough time for a ping of rank 0 and its answer.
    group.set_timeout(rank == 0 ? milliseconds(4000) : milliseconds(60'000));
    const Status status = run(group, spec_of(Collective::kAllReduce, 10, 3));
    --waiting;
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "timed out in all_reduce");
    EXPECT_CONTAINS(status, "which has called it too: see its log for the rank that it waits for");
    if (rank == 1) {
      EXPECT_CONTAINS(status, "reported by rank 0");
      EXPECT_CONTAINS(status, " s for rank 2 (pid");
    }
  });
}

TEST(HierarchicalFailure, SilenceIsLossAfterAWhile) {
  Hosts hosts({0, 1}, {}, milliseconds(1500));
  hosts.in_group("silent", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    net::Faults deaf;
    deaf.lose = 1;
    hosts.net().set_faults(rank, 1 - rank, deaf);
    const auto began = Clock::now();
    const Status status = run(group, spec_of(Collective::kAllReduce, 1000, 2));
    EXPECT_GT(Clock::now() - began, milliseconds(1400));
    EXPECT_LT(Clock::now() - began, milliseconds(4000));
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, rank == 0 ? "rank 1 (pid" : "rank 0 (pid");
    EXPECT_CONTAINS(status, "did not answer pings");
  });
}

/// Buffers that runs still write to when an operation fails outlive the runs. AddressSanitizer checks it.
TEST(HierarchicalFailure, LeavesNothingToWriteToFreedMemory) {
  Hosts hosts({0, 0, 0, 1});
  std::atomic<int> past{0};
  hosts.in_group("freed", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    ++past;
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return past == 4; }));
    if (rank == 2) return;  // leaves, while the rail of its host carries data for it
    EXPECT_FALSE(run(group, spec_of(Collective::kReduceScatter, 300'000, 4)).ok());
  });
}

TEST(HierarchicalFailure, AMonitoredBarrierNamesTheMissingOfAllHosts) {
  Hosts hosts(kTwoOfTwo);
  std::atomic<bool> over{false};
  hosts.in_group("monitored", [&](Group& group, int rank) {
    ASSERT_TRUE(group.monitored_barrier(milliseconds(10'000), /*name_all=*/true).ok());
    const bool missing = rank == 1 || rank == 3;
    EXPECT_TRUE(!missing || eventually(milliseconds(10'000), [&] { return over.load(); }));
    const Status status = group.monitored_barrier(milliseconds(rank == 0 ? 300 : 600), /*name_all=*/true);
    EXPECT_FALSE(status.ok());
    if (rank == 0) {
      EXPECT_CONTAINS(status, "Ranks 1, 3 failed to pass monitoredBarrier");
      std::string near = group.topology().describe(1);  // its last call is known, since it is of this host
      near.pop_back();
      EXPECT_CONTAINS(status,
                      "waited for " + near + ", no collective in this group yet), " + group.topology().describe(3));
      over = true;
    }
    EXPECT_FALSE(group.failed());
    EXPECT_TRUE(barrier(group).ok());
    EXPECT_TRUE(group.monitored_barrier(milliseconds(10'000), /*name_all=*/false).ok());
  });
}

/// A store that fails one rank after all have arrived.
class LostStore : public Store {
 public:
  explicit LostStore(Store& good) : good_(good) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { good_.set(key, value); }
  int64_t add(const std::string& key, int64_t n) override { return good_.add(key, n); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    auto value = good_.get(key, span);
    if (value && key.ends_with("/table")) throw Error(Code::kSystem, "nvx: the store is gone");
    return value;
  }

 private:
  Store& good_;
};

TEST(InterHostSetUpFailure, ARankThatFailsIsNamedOnAllHosts) {
  Hosts hosts({0, 1, 2});
  MemoryStore store;
  as_threads(3, [&](int rank) {
    LostStore lost(store);
    const std::string error = set_up_error(rank == 2 ? static_cast<Store&>(lost) : store, hosts.options("far", rank));
    EXPECT_NE(error.find("the store is gone"), std::string::npos) << error;
    if (rank != 2) {
      EXPECT_NE(error.find("rank 2 (pid"), std::string::npos) << error;
      EXPECT_NE(error.find(", host host2) failed to create group"), std::string::npos) << error;
    }
  });
}

/// A store that ends with its server and answers slowly.
class ServedStore : public Store {
 public:
  ServedStore(Store& kept, const std::atomic<bool>& gone) : kept_(kept), gone_(gone) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { served().set(key, value); }
  int64_t add(const std::string& key, int64_t n) override { return served().add(key, n); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    std::this_thread::sleep_for(milliseconds(100));
    return served().get(key, span);
  }

 private:
  Store& served() {
    if (gone_) throw Error(Code::kSystem, "nvx: nobody serves the store");
    return kept_;
  }
  Store& kept_;
  const std::atomic<bool>& gone_;
};

TEST(InterHostSetUpFailure, TheStoreIsServedUntilAllHaveReadTheFailure) {
  Hosts hosts({0, 1, 2});
  MemoryStore store;
  std::atomic<bool> gone{false};
  as_threads(3, [&](int rank) {
    ServedStore served(store, gone);
    LostStore lost(store);
    Store& own = rank == 2 ? static_cast<Store&>(lost) : rank == 1 ? static_cast<Store&>(served) : store;
    const std::string error = set_up_error(own, hosts.options("served", rank));
    if (rank == 0) gone = true;
    EXPECT_NE(error.find("the store is gone"), std::string::npos) << error;
    if (rank != 2) {
      EXPECT_NE(error.find("rank 2 (pid"), std::string::npos) << error;
    }
  });
}

/// Ranks of another group already know each other, so they know whether a missing rank is alive.
TEST(InterHostSetUpFailure, ARankThatIsLostIsNotWaitedFor) {
  Hosts hosts({0, 1, 2});
  MemoryStore store, second;
  std::atomic<int> past{0}, over{0};
  as_threads(3, [&](int rank) {
    GroupOptions first = hosts.options("first", rank), then = hosts.options("then", rank);
    first.global_ranks = then.global_ranks = {10, 11, 12};
    Group group(store, first);
    EXPECT_TRUE(barrier(group).ok());
    ++past;  // a rank that dies loses the data it has in flight
    if (rank == 2) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return past == 3; }));
      hosts.net().kill(2);
      EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return over == 2; }));
      return;
    }
    const std::string error = set_up_error(second, then);
    EXPECT_NE(error.find("global rank 12 (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(", host host2) is lost"), std::string::npos) << error;
    ++over;
  });
}

}  // namespace
}  // namespace nvx::test
