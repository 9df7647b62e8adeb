// Errors of a group: which rank is named, how soon, and which calls still work.

#include <gtest/gtest.h>
#include <signal.h>

#include "base/interrupt.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

Spec all_reduce_of(size_t n, DType dtype = DType::kF32) {
  return {.collective = Collective::kAllReduce, .dtype = dtype, .counts = {n}};
}

class Sizes : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Elements, Sizes, testing::Values(10, 200'000));

TEST_P(Sizes, AMismatchNamesBothSidesOnEveryRank) {
  MemoryStore store;
  constexpr int kRanks = 3;
  as_threads(kRanks, [&](int rank) {
    Group group(store, options("mismatch", rank, kRanks));
    const Status status = run(group, all_reduce_of(GetParam(), rank == 1 ? DType::kI32 : DType::kF32));
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed) << status.what();
    EXPECT_CONTAINS(status, "collective mismatch in group mismatch");
    if (status.code() == Code::kMismatch) {
      EXPECT_CONTAINS(status, "with the same shapes, types, operators and roots");
    }
    EXPECT_CONTAINS(status, "rank 1 (pid");
    EXPECT_CONTAINS(status, "all_reduce(sum, i32");
    EXPECT_CONTAINS(status, "all_reduce(sum, f32");
    EXPECT_TRUE(group.failed());
    const Status later = barrier(group);
    ASSERT_FALSE(later.ok()) << "the first failure stays";
    EXPECT_CONTAINS(later, "mismatch");
  });
}

TEST(Failure, AMismatchInABarrierBeforeACallNamesBothCalls) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("meetings", rank, 2));
    Operation meeting;
    meeting.collective = Collective::kBarrier;
    meeting.precedes = Collective::kAllReduce;
    meeting.dtype = DType::kF32;
    meeting.count = 7;
    EXPECT_TRUE(group.execute(meeting).ok());
    if (rank == 1) meeting.op = ReduceOp::kMax;
    meeting.number = 0;
    const Status status = group.execute(meeting);
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "all_reduce(sum, f32, 7 elements)");
    EXPECT_CONTAINS(status, "all_reduce(max, f32, 7 elements)");
  });
}

TEST_P(Sizes, RootsThatDifferAreNamedSoon) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("roots", rank, 2));
    const size_t n = rank == 0 ? GetParam() : 10;
    const Spec spec{.collective = Collective::kBroadcast, .root = rank, .counts = {n, n}};
    Status status;
    for (int i = 0; i < 5 && status.ok(); ++i) status = run(group, spec);
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed) << status.what();
    EXPECT_CONTAINS(status, "collective mismatch in group roots");
    EXPECT_CONTAINS(status, "root 0)");
    EXPECT_CONTAINS(status, "root 1)");
  });
}

TEST_P(Sizes, ATimeoutNamesTheMissingRanks) {
  MemoryStore store;
  constexpr int kRanks = 4;
  std::atomic<int> ready{0}, waiting{kRanks - 2};
  as_threads(kRanks, [&](int rank) {
    Group group(store, options("timeout", rank, kRanks));
    if (rank >= 2) {
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return waiting == 0; }));
      return;
    }
    group.set_timeout(milliseconds(500));
    ++ready;
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return ready == kRanks - 2; }));
    const auto began = Clock::now();
    const Status status = run(group, all_reduce_of(GetParam()));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
    --waiting;
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == Code::kTimeout || status.code() == Code::kPeerFailed) << status.what();
    EXPECT_CONTAINS(status, "timed out in all_reduce");
    EXPECT_CONTAINS(status, "rank 2 (pid");
    EXPECT_CONTAINS(status, "rank 3 (pid");
    EXPECT_EQ(status.what().find("waiting for rank 0"), std::string::npos) << status.what();
  });
}

TEST_P(Sizes, AKilledRankIsNamedInUnderASecond) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  constexpr int kRanks = 3;
  const auto endings = as_processes(kRanks, [&](int rank) {
    Group group(store, options("killed", rank, kRanks));
    ASSERT_EQ(perform(group, all_reduce_of(GetParam())), "");
    if (rank == 1) raise(SIGKILL);
    const auto began = Clock::now();
    const Status status = run(group, all_reduce_of(GetParam()));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(1));
    ASSERT_FALSE(status.ok());
    EXPECT_TRUE(status.code() == Code::kPeerDied || status.code() == Code::kPeerFailed) << status.what();
    EXPECT_CONTAINS(status, "rank 1 (pid");
    EXPECT_CONTAINS(status, "has ended");
  });
  EXPECT_TRUE(endings[0].well());
  EXPECT_EQ(endings[1].signal, SIGKILL);
  EXPECT_TRUE(endings[2].well());
}

TEST(Failure, ARankThatExitsWithoutDestroyIsNamed) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(2, [&](int rank) {
    Group* group = new Group(store, options("exited", rank, 2));
    if (rank == 1) _exit(3);
    const Status status = barrier(*group);
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "rank 1 (pid");
    delete group;
  });
  EXPECT_TRUE(endings[0].well());
  EXPECT_EQ(endings[1].exit_code, 3);
}

/// A queued call, as the torch layer makes it, of an operation whose memory the task owns.
class Queued : public Task {
 public:
  Queued(Group& group, const Spec& spec)
      : side_(spec, group.rank(), group.size()), group_(group), operation_(operation_of(spec, side_, group.size())) {}
  void perform(Runner runner) override {
    status_ = group_.run(operation_, runner);
    ended = true;
  }
  const Status& status() const { return status_; }
  std::string verdict() { return side_.verdict(); }
  std::atomic<bool> ended{false};

 private:
  Side side_;
  Group& group_;
  Operation operation_;
  Status status_;
};

/// Makes every call of a group; each must be refused in a forked child.
void use_in_child(Group& group) {
  const Status status = barrier(group);
  ASSERT_FALSE(status.ok());
  EXPECT_CONTAINS(status, "forked");
  EXPECT_CONTAINS(group.monitored_barrier(milliseconds(5000), /*name_all=*/true), "forked");
  EXPECT_CONTAINS(group.fail({Code::kSystem, "in the child"}), "forked");
  EXPECT_FALSE(group.failed());
  group.abort("in the child");
  EXPECT_CONTAINS(group.failure(), "forked");
  for (const bool sends : {true, false}) {
    Bytes memory(10);
    const auto request = message(1 - group.rank(), 0, memory.data(), memory.size());
    bool finished = false;
    request->finished = [&](const Message&) { finished = true; };
    sends ? group.mailbox().send(request, Runner::kPool) : group.mailbox().receive(request, Runner::kPool);
    EXPECT_CONTAINS(group.mailbox().wait(*request), "forked");
    EXPECT_TRUE(finished);
  }
  const auto task = std::make_shared<Queued>(group, all_reduce_of(10));
  group.lane().submit(task);
  ASSERT_TRUE(group.lane().wait(*task, nvx::Lane::MayRun::kYes, nullptr));
  EXPECT_CONTAINS(task->status(), "forked");
  group.mailbox().settle(milliseconds(1000));
  group.mailbox().close();
  group.leave();
}

/// A forked child has a copy of the object. It must neither use the group nor harm it.
TEST(Failure, AForkedChildIsRefusedAndHarmsNobody) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(2, [&](int rank) {
    auto group = std::make_unique<Group>(store, options("forked", rank, 2));
    if (rank == 0) {
      all_end_well(1, [&](int) {
        use_in_child(*group);
        group.reset();
      });
    }
    EXPECT_TRUE(barrier(*group).ok());
  });
}

TEST(Failure, RankThatLeavesWhileAwaitedIsNamed) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("left", rank, 2));
    if (rank == 1) return;
    const Status status = barrier(group);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kPeerLeft);
    EXPECT_CONTAINS(status, "rank 1 (pid");
    EXPECT_CONTAINS(status, ", no collective in this group yet) has left group left");
    EXPECT_CONTAINS(status, ": it has destroyed the group, or its process ends; this is rank 0");
    EXPECT_EQ(status.what().find("(pid"), status.what().rfind("(pid")) << "describes it twice: " << status.what();
  });
}

/// Signals that a rank sent before it left still count: leaving right after the last operation is no failure.
TEST(Failure, LeavingAfterTheLastOperationIsNone) {
  for (int round = 0; round < int(as_fast(30, 8)); ++round) {
    MemoryStore store;
    as_threads(3, [&](int rank) {
      Group group(store, options("last", rank, 3));
      ASSERT_EQ(perform(group, all_reduce_of(round % 2 ? 50'000 : 100)), "");
      ASSERT_EQ(perform(group, {.collective = Collective::kBroadcast, .root = round % 3, .counts = {1000, 1000, 1000}}),
                "");
    });
  }
}

/// A rank that left in good order does not report its later end.
TEST(Failure, LeavingFailsNoPeer) {
  MemoryStore store;
  std::atomic<bool> failed{false};
  as_threads(3, [&](int rank) {
    Group group(store, options("good order", rank, 3));
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 0) {
      group.leave();
      group.abort("after it has left");
      failed = true;
      return;
    }
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return failed.load(); }));
    Bytes memory(10);
    if (rank == 2) std::this_thread::sleep_for(milliseconds(300));  // the other rank checks for failures meanwhile
    const auto request = message(3 - rank, 0, memory.data(), memory.size());
    const Status status = rank == 2 ? send_now(group, request) : receive_now(group, request);
    EXPECT_TRUE(status.ok()) << status.what();
  });
}

TEST(Failure, AbortEndsWhatIsInFlightHereAndThere) {
  MemoryStore store;
  as_threads(3, [&](int rank) {
    Group group(store, options("aborted", rank, 3));
    if (rank == 2) {
      std::this_thread::sleep_for(milliseconds(100));
      group.abort("because the test says so");
      group.abort("a second time");
      std::this_thread::sleep_for(milliseconds(300));
      return;
    }
    std::thread aborter;
    if (rank == 0) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(50));
        group.abort("on rank 0");
      });
    }
    const auto began = Clock::now();
    const Status status = barrier(group);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "was aborted on rank");
    if (aborter.joinable()) aborter.join();
  });
}

TEST(Failure, DestroyDoesNotWaitForPeers) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    auto group = std::make_unique<Group>(store, options("destroy", rank, 2));
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(1500));
      return;
    }
    const auto began = Clock::now();
    group.reset();
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(1));
  });
}

/// The group's memory must outlive its own operation that a pool thread still runs.
TEST(Failure, DestroyEndsItsOwnOperationsInFlight) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    auto group = std::make_unique<Group>(store, options("in flight", rank, 2));
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(2500));
      return;
    }
    const auto task = std::make_shared<Queued>(*group, all_reduce_of(100'000));
    group->lane().submit(task);
    std::this_thread::sleep_for(milliseconds(50));
    const auto began = Clock::now();
    group.reset();
    EXPECT_TRUE(task->ended) << "the group is gone, its operation still runs";
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
    EXPECT_TRUE(!task->ended || !task->status().ok());
    EXPECT_TRUE(eventually(milliseconds(5000), [&] { return task->done(); }));
  });
}

TEST(Failure, QueuedOperationsEndWithTheFirstFailure) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("queued", rank, 2));
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      return;
    }
    std::vector<std::shared_ptr<Queued>> tasks;
    for (int i = 0; i < 5; ++i) {
      tasks.push_back(std::make_shared<Queued>(group, all_reduce_of(10)));
      group.lane().submit(tasks.back());
    }
    for (const auto& task : tasks) {
      ASSERT_TRUE(group.lane().wait(*task, nvx::Lane::MayRun::kYes, nullptr));
      EXPECT_FALSE(task->status().ok());
      EXPECT_CONTAINS(task->status(), "rank 1 (pid");
    }
  });
}

TEST(Failure, QueuedOperationsRunInOrderBesideCalls) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("order", rank, 2));
    std::vector<std::shared_ptr<Queued>> tasks;
    for (size_t i = 0; i < 20; ++i) {
      Spec spec = all_reduce_of(i % 2 ? 30'000 : 30 + i);
      spec.round = i;
      tasks.push_back(std::make_shared<Queued>(group, spec));
      group.lane().submit(tasks.back());
      const bool calls = i % 5 == 4;
      ASSERT_EQ(calls ? perform(group, all_reduce_of(77)) : "", "");
    }
    for (const auto& task : tasks) {
      ASSERT_TRUE(group.lane().wait(*task, nvx::Lane::MayRun::kYes, nullptr));
      ASSERT_TRUE(task->status().ok()) << task->status().what();
      EXPECT_EQ(task->verdict(), "");
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(Failure, MonitoredBarrierNamesTheMissingAndTheGroupStaysUsable) {
  MemoryStore store;
  constexpr int kRanks = 4;
  std::atomic<bool> over{false};
  as_threads(kRanks, [&](int rank) {
    Group group(store, options("monitored", rank, kRanks));
    ASSERT_TRUE(group.monitored_barrier(milliseconds(10'000), /*name_all=*/true).ok());
    EXPECT_TRUE(rank < 2 || eventually(milliseconds(10'000), [&] { return over.load(); }));
    const Status status = group.monitored_barrier(milliseconds(rank == 0 ? 200 : 400), /*name_all=*/true);
    EXPECT_FALSE(status.ok());
    std::string where = group.topology().location(0);  // the same for all ranks, because they are threads
    where.back() = ',';                                // the last call follows
    if (rank == 0) {
      EXPECT_CONTAINS(status, "nvx: Ranks 2, 3 failed to pass monitoredBarrier in 0.");
      EXPECT_CONTAINS(status, "; this is rank 0 in monitored_barrier of group monitored, waited for rank 2 " + where +
                                  " no collective in this group yet), rank 3 " + where +
                                  " no collective in this group yet). Next: see the logs of these ranks");
      over = true;
    } else if (rank == 1) {
      EXPECT_CONTAINS(status, "nvx: Rank 1 successfully reached monitoredBarrier");
      EXPECT_CONTAINS(status, "; this is rank 1 in monitored_barrier of group monitored, waited 0.");
      EXPECT_CONTAINS(status, " s for rank 0 " + where);
    }
    EXPECT_FALSE(group.failed());
    EXPECT_TRUE(barrier(group).ok());
  });
}

TEST(SetUp, ARankThatDoesNotComeEndsItInTime) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    GroupOptions alone = options("alone", rank, 3);
    alone.timeout = milliseconds(300);
    const auto began = Clock::now();
    try {
      Group group(store, alone);
      ADD_FAILURE() << "made without rank 2";
    } catch (const Error& error) {
      const std::string text = error.what();
      const bool reported = error.code() == Code::kPeerFailed;  // the failure that the other rank reported
      EXPECT_TRUE(reported || error.code() == Code::kTimeout) << text;
      EXPECT_NE(text.find("timed out after 0."), std::string::npos) << text;
      EXPECT_NE(text.find(": rank 2 has not joined; this is rank"), std::string::npos) << text;
      EXPECT_NE(text.find(". Next: check that every rank runs"), std::string::npos) << text;
      EXPECT_NE(text.find("with the same list of ranks in new_group();"), std::string::npos) << text;
      EXPECT_EQ(text.find("nvx/"), std::string::npos) << "names a key of the store: " << text;
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
  });
}

/// Rank 0 usually serves the store and stays in the constructor of the store until all ranks have connected.
TEST(SetUp, RankZeroIsNotBlamedWhereItMayWaitForTheOthers) {
  MemoryStore store;
  GroupOptions alone = options("middle", 1, 3);
  alone.timeout = milliseconds(300);
  try {
    Group group(store, alone);
    ADD_FAILURE() << "made without ranks 0 and 2";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("ranks 0, 2 have not joined (if rank 0 serves the store, torch blocks it until"),
              std::string::npos)
        << text;
  }
}

/// A store that fails or stalls one rank after all ranks have arrived and may have mapped each other.
class BadStore : public Store {
 public:
  BadStore(Store& good, std::function<void()> act) : good_(good), act_(std::move(act)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { good_.set(key, value); }
  int64_t add(const std::string& key, int64_t n) override { return good_.add(key, n); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    auto value = good_.get(key, span);
    if (value && key.ends_with("/table")) act_();
    return value;
  }

 private:
  Store& good_;
  std::function<void()> act_;
};

[[noreturn]] void lose_the_store() { throw Error(Code::kSystem, "nvx: the store is gone"); }

/// ... also on a rank that waits for another, late rank. Both are alone on their hosts, so they read the store
/// themselves.
TEST(SetUp, ARankThatFailsIsNamedWithTheReason) {
  Hosts hosts({0, 1, 0, 2});
  MemoryStore store;
  std::atomic<int> reported{0};
  BadStore late(store, [&] { EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return reported == 3; })); });
  BadStore bad(store, lose_the_store);
  as_threads(4, [&](int rank) {
    Store& mine = rank == 1 ? static_cast<Store&>(late) : rank == 3 ? static_cast<Store&>(bad) : store;
    const std::string error = set_up_error(mine, hosts.options("named", rank));
    ++reported;
    EXPECT_NE(error.find("the store is gone"), std::string::npos) << error;
    if (rank != 3) {
      EXPECT_NE(error.find("rank 3 (pid"), std::string::npos) << error;
    }
  });
}

/// Fills the arena of this process for its lifetime.
class FullArena {
 public:
  FullArena() {
    for (size_t bytes = Arena::kBytes; bytes >= 4096;) {
      try {
        spans_.push_back(shm_->arena().allocate(bytes));
      } catch (const Error&) {
        bytes /= 2;
      }
    }
  }
  ~FullArena() {
    for (const Span& span : spans_) shm_->arena().free(span);
  }

 private:
  std::shared_ptr<ShmRegistry> shm_ = ShmRegistry::instance();
  std::vector<Span> spans_;
};

/// A rank that fails before it writes anything into the store.
TEST(SetUp, ARankThatFailsAtOnceIsNamedWithTheReason) {
  MemoryStore store;
  const auto shm = ShmRegistry::instance();
  const size_t before = shm->arena().used();
  std::string error;
  std::thread waiting([&] { error = set_up_error(store, options("at once", 0, 2)); });
  EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return shm->arena().used() != before; }));
  {
    const FullArena full;
    const std::string own = set_up_error(store, options("at once", 1, 2));
    EXPECT_NE(own.find("full"), std::string::npos) << own;
  }
  waiting.join();
  EXPECT_NE(error.find("rank 1 (pid"), std::string::npos) << error;
  EXPECT_NE(error.find("full"), std::string::npos) << error;
}

/// Makes the main thread see an interrupt, as after Ctrl-C.
class Interrupted {
 public:
  Interrupted() {
    interrupt_check = [] { return true; };
  }
  ~Interrupted() { interrupt_check = nullptr; }
};

TEST(SetUp, EndsOnAStopRequest) {
  const Interrupted interrupted;
  MemoryStore store;
  const std::string error = set_up_error(store, options("interrupted", 0, 2));
  EXPECT_NE(error.find("interrupted by the user"), std::string::npos) << error;
}

TEST(SetUp, WaitingForAnotherRanksMemoryEndsOnAStopRequest) {
  const auto shm = ShmRegistry::instance();
  IpcSocket mine(*shm), closed(*shm);
  const Interrupted interrupted;
  try {
    mine.fetch({{ArenaId{1, 2}, closed.name(), getpid()}}, Deadline::after(milliseconds(60'000)));
    ADD_FAILURE() << "nobody answers there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInterrupted) << error.what();
  }
}

TEST(SetUp, AGroupCanBeMadeAgainAfterAFailure) {
  MemoryStore broken, store;
  as_threads(2, [&](int rank) {
    GroupOptions alone = options("broken", rank, 3);
    alone.timeout = milliseconds(100);
    EXPECT_THROW(Group(broken, alone), Error);
    Group group(store, options("again", rank, 2));
    EXPECT_TRUE(barrier(group).ok());
  });
}

/// The store may be the same, and may still hold the keys of the earlier group.
TEST(SetUp, AGroupCanBeMadeAgainInTheSameStore) {
  MemoryStore store;
  as_threads(3, [&](int rank) {
    for (int round = 0; round < int(as_fast(20, 6)); ++round) {
      Group group(store, options("again", rank, 3));
      ASSERT_EQ(perform(group, all_reduce_of(round % 2 ? 50'000 : 100)), "");
    }
  });
}

/// A rank that died in a set-up and comes back counts another generation than the ranks that waited for it.
TEST(SetUp, RanksThatAreBehindFollow) {
  for (int ahead = 0; ahead < 3; ++ahead) {
    MemoryStore store;
    store.add("nvx/generation/" + std::to_string(ahead), 2);
    as_threads(3, [&](int rank) {
      for (int round = 0; round < 3; ++round) {
        Group group(store, options("behind", rank, 3));
        ASSERT_EQ(perform(group, all_reduce_of(100)), "");
      }
    });
  }
}

/// A table in which this rank has other data than it has now.
TEST(SetUp, ATableOfAnotherSetUpIsRefused) {
  MemoryStore store;
  const std::vector<Hello> old{describe_self(0), describe_self(1)};
  store.set("nvx/1/table", encode(old));
  EXPECT_THROW(Group(store, options("old", 1, 2)), Error);
}

TEST(SetUp, MalformedHelloIsRefused) {
  for (const std::vector<uint8_t>& rubbish : {std::vector<uint8_t>{}, std::vector<uint8_t>(sizeof(Hello), 0xff)}) {
    MemoryStore store;
    store.set("nvx/1/1", rubbish);
    EXPECT_THROW(Group(store, options("rubbish", 0, 2)), Error);
  }
}

/// A hello that is well formed but describes memory outside its bounds.
TEST(SetUp, AHelloThatDescribesImpossibleMemoryIsRefused) {
  for (const uint64_t offset :
       {uint64_t(Arena::kBytes), uint64_t(Arena::kBytes) - 4096, ~uint64_t(0) - 4095, uint64_t(17)}) {
    MemoryStore store;
    Hello forged = describe_self(1);
    forged.arena = ShmRegistry::instance()->arena().id();
    forged.pad_offset = offset;
    forged.ranks = 2;
    store.set("nvx/1/1", encode({&forged, 1}));
    EXPECT_THROW(Group(store, options("forged", 0, 2)), Error) << offset;
  }
}

}  // namespace
}  // namespace nvx::test
