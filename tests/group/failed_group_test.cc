// Errors of a group after it has failed, here or on another rank: that it failed, why, and what to do.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <latch>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

Status all_reduce(Group& group, size_t n) {
  const Spec spec{.collective = Collective::kAllReduce, .dtype = DType::kF32, .counts = {n}};
  Side side(spec, group.rank(), group.size());
  Operation operation = operation_of(spec, side, group.size());
  return group.execute(operation);
}

Status send_or_receive(Group& group, bool receives) {
  Bytes memory(10);
  const auto one = message(1 - group.rank(), 0, memory.data(), memory.size());
  return receives ? receive_now(group, one) : send_now(group, one);
}

#define EXPECT_LACKS(status, text) \
  EXPECT_EQ((status).what().find(text), std::string::npos) << "says: " << (status).what()

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// The ranks are on one host, or on one host each.
class IntraHostFailure : public testing::TestWithParam<bool> {
 protected:
  GroupOptions options(const std::string& name, int rank) {
    return GetParam() ? test::options(name, rank, 2) : hosts_.options(name, rank);
  }
  Hosts hosts_{{0, 1}};
  MemoryStore store_;
};
INSTANTIATE_TEST_SUITE_P(OnOneHost, IntraHostFailure, testing::Bool());

TEST_P(IntraHostFailure, ErrorsOfLaterCallsNameTheEarlierFailureAndAdvice) {
  std::atomic<bool> over{false};
  as_threads(2, [&](int rank) {
    Group group(store_, options("failed", rank));
    if (rank == 1) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      return;
    }
    group.set_timeout(milliseconds(200));
    const Status first = all_reduce(group, 10);
    over = true;
    ASSERT_FALSE(first.ok());
    EXPECT_LACKS(first, "earlier");
    EXPECT_CONTAINS(first, "init_process_group(timeout=)");
    Status monitored = group.monitored_barrier(milliseconds(100), /*name_all=*/false);
    const std::pair<Status, const char*> calls[] = {{all_reduce(group, 11), "all_reduce(sum, f32, 11 elements)"},
                                                    {send_or_receive(group, true), "recv("},
                                                    {send_or_receive(group, false), "send("},
                                                    {monitored, "monitored_barrier"}};
    for (const auto& [later, call] : calls) {
      ASSERT_FALSE(later.ok());
      EXPECT_EQ(later.code(), first.code());
      EXPECT_CONTAINS(later, "nvx: group failed failed earlier, so " + std::string(call));
      EXPECT_CONTAINS(later, " was not begun; first error: timed out in all_reduce(sum, f32, 10 elements)");
      EXPECT_CONTAINS(later, "rank 1 (pid");
      EXPECT_CONTAINS(later, ". Next: destroy the group and make another one");
      EXPECT_LACKS(later, "raise the timeout");
    }
    EXPECT_EQ(group.failure().what(), first.what());
  });
}

/// An error names the timeout once, even if the rank listens for longer.
TEST_P(IntraHostFailure, ATimeoutNamesOneDuration) {
  std::atomic<bool> over{false};
  as_threads(2, [&](int rank) {
    Group group(store_, options("once", rank));
    if (rank == 1) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      return;
    }
    group.set_timeout(milliseconds(250));
    const Status status = all_reduce(group, 10);
    over = true;
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(count_of(status.what(), " s,") + count_of(status.what(), " s;") + count_of(status.what(), " s."), 1u)
        << status.what();
  });
}

/// A late rank does not carry out alone an operation that its peer gave up: neither a collective nor a message.
TEST_P(IntraHostFailure, LateRankLearnsThatItsPeerGaveUp) {
  for (const char* what : {"all_reduce", "large", "broadcast", "send", "recv"}) {
    const std::string name = std::string("late at ") + what;
    std::atomic<bool> over{false};
    MemoryStore store;
    as_threads(2, [&](int rank) {
      const auto call = [&](Group& group) -> Status {
        if (std::string(what) == "all_reduce") return all_reduce(group, 10);
        if (std::string(what) == "large") return all_reduce(group, 100'000);
        if (std::string(what) == "send") return send_or_receive(group, /*receives=*/rank == 0);
        if (std::string(what) == "recv") return send_or_receive(group, /*receives=*/rank == 1);
        Bytes memory(40);
        Operation o;
        o.collective = Collective::kBroadcast;
        o.dtype = DType::kF32;
        o.count = 10;
        o.root = 1;
        o.in = o.out = memory.data();
        o.send = Pieces(2);
        o.recv = Pieces(2);
        for (size_t r = 0; r < 2; ++r) o.recv[r] = {memory.data(), memory.size()};
        return group.execute(o);
      };
      Group group(store, options(name, rank));
      ASSERT_TRUE(barrier(group).ok());
      if (rank == 0) {
        group.set_timeout(milliseconds(200));
        Status status = call(group);
        if (status.ok()) status = barrier(group);  // a send completes at once
        EXPECT_CONTAINS(status, "timed out in");
        over = true;
        return;
      }
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      // Between hosts the notice takes a while to arrive.
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return !group.core().port || group.core().port->failed(); }));
      const Status late = call(group);
      ASSERT_FALSE(late.ok()) << what;
      EXPECT_CONTAINS(late, "timed out in");
    });
  }
}

/// The same, if this call is the first to see the failure.
TEST(LateRank, GetsAnErrorThatNamesTheRankThatGaveUp) {
  MemoryStore store;
  std::atomic<bool> over{false};
  as_threads(2, [&](int rank) {
    Group group(store, test::options("late", rank, 2));
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 0) {
      group.set_timeout(milliseconds(200));
      EXPECT_FALSE(all_reduce(group, 10).ok());
      over = true;
      return;
    }
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
    const Status late = all_reduce(group, 10);
    ASSERT_FALSE(late.ok()) << "the sum that rank 0 never had";
    EXPECT_EQ(late.code(), Code::kPeerFailed);
    EXPECT_CONTAINS(late, "timed out in all_reduce(sum, f32, 10 elements) #2 of group late after");
    EXPECT_CONTAINS(late, "waiting for rank 1 (pid");
    EXPECT_CONTAINS(late, "reported by rank 0");
    EXPECT_CONTAINS(late,
                    "this is rank 1, which called all_reduce(sum, f32, 10 elements) #2 after that. Next: see what kept "
                    "this rank, or allow more time");
  });
}

/// Decisions after a failure depend on its facts, not on its text.
TEST_P(IntraHostFailure, TextOfAFailureIsNoFact) {
  std::latch begun(2);
  std::atomic<bool> over{false};
  as_threads(2, [&](int rank) {
    Group group(store_, options("words", rank));
    EXPECT_TRUE(barrier(group).ok());
    begun.arrive_and_wait();
    const std::string words = "it hung, waiting for " + group.topology().describe(0) + ". Next: tea; before that, all";
    if (rank == 1) {
      group.abort(words);
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      return;
    }
    const Status status = all_reduce(group, 10);
    over = true;
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kPeerFailed);
    EXPECT_EQ(status.failure().code, Code::kAborted);
    EXPECT_CONTAINS(status, words + "; reported by rank 1; this is rank 0");
    EXPECT_CONTAINS(status, ". Next: see the log of the rank named first");
    EXPECT_CONTAINS(all_reduce(group, 10), words + "; reported by rank 1");
  });
}

TEST(FailureReport, ADamagedNoteFailsTheGroupToo) {
  MemoryStore store;
  std::latch begun(2);
  std::atomic<bool> over{false};
  as_threads(2, [&](int rank) {
    Group group(store, test::options("damaged", rank, 2));
    EXPECT_TRUE(barrier(group).ok());
    begun.arrive_and_wait();
    if (rank == 1) {
      kernel::PostedNote& posted = group.core().members.own_pad().header().failure;
      std::memset(static_cast<void*>(&posted.note), 0x55, sizeof posted.note);
      posted.state = kernel::PostedNote::kReadable;
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      return;
    }
    const Status status = all_reduce(group, 10);
    over = true;
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kPeerFailed);
    EXPECT_CONTAINS(status,
                    "nvx: the failure note of rank 1 is damaged or from another version of nvx; reported by rank 1");
  });
}

/// When a rank of this host is reported lost, its reason may arrive a moment later. Neither a rank that begins a
/// message nor a rank that progresses messages waits for that reason.
class Meanwhile : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(IsOpen, Meanwhile, testing::Bool());

TEST_P(Meanwhile, TheMailboxIsFreeForOthers) {
  const bool is_open = GetParam();
  const auto try_once = [&] {
    MemoryStore store;
    std::latch begun(2), reported(2);
    std::atomic<bool> over{false};
    Clock::duration longest{0};
    as_threads(3, [&](int rank) {
      Group group(store, test::options("meanwhile", rank, 3));
      EXPECT_TRUE(barrier(group).ok());
      Bytes memory(10);
      const auto one = message(1, 0, memory.data(), memory.size());
      if (rank == 0 && is_open) group.mailbox().receive(one, Runner::kPool);
      if (rank != 1) begun.arrive_and_wait();
      if (rank == 2)
        (void)group.fail({.code = Code::kPeerDied, .cause = group.topology().describe(1) + " is lost", .lost_rank = 1});
      if (rank != 1) reported.arrive_and_wait();
      if (rank != 0) {
        EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
        return;
      }
      const auto call = [&] {
        const auto start = Clock::now();
        is_open ? group.mailbox().push(Runner::kPool) : group.mailbox().receive(one, Runner::kCaller);
        longest = std::max(longest, Clock::now() - start);
      };
      do call();
      while (is_open && !group.failed());
      const Status status = group.mailbox().wait(*one);
      EXPECT_EQ(status.code(), Code::kPeerFailed);
      EXPECT_CONTAINS(status, "is lost; reported by rank 2");
      over = true;
    });
    return longest;
  };
  Clock::duration best = Clock::duration::max();  // the minimum, because the machine may be busy
  for (int tries = 0; tries < 20 && best >= FailureState::kEndingGrace / 2; ++tries) best = std::min(best, try_once());
  EXPECT_LT(best, FailureState::kEndingGrace / 2);
}

/// The error points into the other rank's program: after its last call, even if only a few calls are kept.
TEST(LateRank, AwaitedRankIsNamedWithItsLastCall) {
  for (int calls = 1; calls <= 6; ++calls) {
    MemoryStore store;
    std::atomic<bool> over{false};
    as_threads(2, [&](int rank) {
      GroupOptions given = test::options("behind", rank, 2);
      given.first_epoch = uint32_t(-3);  // the counters wrap during the test
      Group group(store, given);
      for (int i = 1; i < calls; ++i) EXPECT_TRUE(barrier(group).ok());
      ASSERT_TRUE(all_reduce(group, size_t(10 * calls)).ok());
      if (rank == 1) {
        EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
        return;
      }
      group.set_timeout(milliseconds(50));
      EXPECT_CONTAINS(barrier(group), ", last finished: all_reduce(sum, f32, " + std::to_string(10 * calls) +
                                          " elements)); this is rank 0");
      over = true;
    });
  }
}

TEST(LateRank, RankThatLeftIsNamedWithItsExitCode) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(2, [&](int rank) {
    {
      Group group(store, test::options("ended", rank, 2));
      if (rank == 0) {
        EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return group.core().members.dead(1); }));
        const Status status = barrier(group);
        EXPECT_CONTAINS(status,
                        "has left group ended while other ranks wait for it: its process has ended (exit code 3)");
      }
    }
    if (rank == 1) _exit(3);
  });
  EXPECT_TRUE(endings[0].well());
  EXPECT_EQ(endings[1].exit_code, 3);
}

/// Two of three ranks have failed in a group of their own. That matters only if a rank waits for one of them.
class Elsewhere : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Absent, Elsewhere, testing::Values(1, 2));

TEST_P(Elsewhere, AFailureNamesTheRankThatObservedIt) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(3, [&](int rank) {
    Group all(store, test::options("all", rank, 3));
    ASSERT_TRUE(barrier(all).ok());
    if (rank < 2) {
      Group pair(store, test::options("pair", rank, 2));
      ASSERT_TRUE(barrier(pair).ok());
      if (rank == 1) {
        pair.set_timeout(milliseconds(100));
        EXPECT_EQ(all_reduce(pair, 10).code(), Code::kTimeout);
        store.set("failed", {});
      }
      store.get("failed", milliseconds(20'000));
      EXPECT_EQ(all_reduce(pair, 10).ok(), false);
    }
    if (rank == GetParam()) {
      store.get("over", milliseconds(20'000));
      return;
    }
    all.set_timeout(milliseconds(rank == 0 ? 1'500 : 10'000));
    const Status status = all_reduce(all, 7);
    ASSERT_FALSE(status.ok());
    if (rank != 0) return;
    store.set("over", {});
    EXPECT_CONTAINS(status, "waiting for rank " + std::to_string(GetParam()) + " (pid");
    EXPECT_CONTAINS(status, ", last finished: barrier)");
    if (GetParam() == 1) {
      EXPECT_CONTAINS(status, "; before that, group pair of rank 1 (pid");
      EXPECT_CONTAINS(status, "had failed: timed out in all_reduce(sum, f32, 10 elements)");
    } else {
      EXPECT_LACKS(status, "before that");
    }
    EXPECT_EQ(count_of(status.what(), "Next: "), 1u) << status.what();
  });
  for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
}

TEST(Failure, ARankThatRunsAnotherProgramIsNamed) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(2, [&](int rank) {
    Group group(store, options("replaced", rank, 2));
    if (rank == 1) execlp("sleep", "sleep", "1", nullptr);
    const auto began = Clock::now();
    const Status status = barrier(group);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(1));
    EXPECT_CONTAINS(status, "rank 1 (pid");
    EXPECT_CONTAINS(status, "has ended (exec of another program)");
  });
  for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
}

TEST(Failure, RanksThatWaitForAStoppedRankAreWarned) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(2, [&](int rank) {
    Group group(store, options("stopped", rank, 2));
    if (rank == 1) {
      const pid_t self = getpid();
      if (fork() == 0) {  // wakes it
        std::this_thread::sleep_for(milliseconds(1'900));
        _exit(kill(self, SIGCONT));
      }
      raise(SIGSTOP);
    }
    testing::internal::CaptureStderr();
    const Status status = barrier(group);
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(status.ok()) << status.what();
    if (rank == 1) return;
    EXPECT_NE(log.find(" is stopped by a signal (state T); rank 0 waits for it in group stopped"), std::string::npos)
        << log;
  });
}

/// A cgroup of its own, in one of the hierarchies that have a freezer.
struct Freezer {
  std::string cgroup, control, frozen, thawed;
  static void write(const std::string& file, const std::string& text) { std::ofstream(file) << text; }
  void freeze(pid_t pid) const {
    write(cgroup + "/cgroup.procs", std::to_string(pid));
    write(cgroup + control, frozen);
  }
  void thaw(pid_t pid) const {
    write(cgroup + control, thawed);
    write(cgroup + "/../cgroup.procs", std::to_string(pid));
  }
};

std::vector<Freezer> freezers_made_here() {
  const std::string root = "/sys/fs/cgroup", name = "/nvx-test-" + std::to_string(getpid());
  std::vector<Freezer> made;
  for (const Freezer& freezer :
       {Freezer{root + name, "/cgroup.freeze", "1", "0"}, Freezer{root + "/unified" + name, "/cgroup.freeze", "1", "0"},
        Freezer{root + "/freezer" + name, "/freezer.state", "FROZEN", "THAWED"}}) {
    if (mkdir(freezer.cgroup.c_str(), 0700) != 0) continue;
    if (access((freezer.cgroup + freezer.control).c_str(), W_OK) == 0)
      made.push_back(freezer);
    else
      (void)rmdir(freezer.cgroup.c_str());
  }
  return made;
}

TEST(Failure, NamesARankWhoseCgroupIsFrozen) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::vector<Freezer> freezers = freezers_made_here();
  if (freezers.empty()) GTEST_SKIP() << "this user cannot make a cgroup with a freezer";
  for (const Freezer& freezer : freezers) {
    FolderStore store;
    all_end_well(2, [&](int rank) {
      Group group(store, options("frozen", rank, 2));
      if (rank == 1) {
        const pid_t self = getpid(), other = fork();
        if (other == 0) {
          freezer.freeze(self);
          std::this_thread::sleep_for(milliseconds(2'500));
          freezer.thaw(self);
          _exit(0);
        }
        EXPECT_EQ(waitpid(other, nullptr, 0), other);
        EXPECT_FALSE(barrier(group).ok());
        return;
      }
      group.set_timeout(milliseconds(2'000));
      testing::internal::CaptureStderr();
      const Status status = barrier(group);
      const std::string log = testing::internal::GetCapturedStderr();
      EXPECT_CONTAINS(status, "stopped by the freezer of its cgroup");
      EXPECT_CONTAINS(status, "let rank 1 go on (thaw its cgroup, as docker unpause does), and find out");
      EXPECT_NE(log.find(" is stopped by the freezer of its cgroup; rank 0 waits for it in"), std::string::npos) << log;
    });
    EXPECT_TRUE(eventually(milliseconds(5'000), [&] { return rmdir(freezer.cgroup.c_str()) == 0; })) << freezer.cgroup;
  }
}

}  // namespace
}  // namespace nvx::test
