// A rank ends while others create a group with it, before all ranks have arrived: the others name it at once.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "group/setup/host_setup.h"
#include "group/setup/topology.h"
#include "net/ends.h"
#include "support/groups.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kDelay{300};  // after which it ends; the others are waiting by then
constexpr int kRanks = 5;            // of the group; the last one never comes

struct End {
  const char* name;
  void (*act)();
  const char* expected;
};
void PrintTo(const End& end, std::ostream* out) { *out << end.name; }

const End kKilled{"killed", [] { raise(SIGKILL); }, " has ended (signal 9) while group early was being created"};
const End kExited{"exited", [] { _exit(3); }, " has ended (exit code 3) while group early was being created"};
const End kReplaced{"replaced",
                    [] {
                      prctl(PR_SET_PDEATHSIG, SIGKILL);
                      execlp("sleep", "sleep", "1", nullptr);
                    },
                    " has ended (exec of another program) while group early was being created"};

class EarlyEnd : public testing::TestWithParam<std::tuple<int, End, int>> {};
INSTANTIATE_TEST_SUITE_P(Rank, EarlyEnd,
                         testing::Combine(testing::Values(0, 1), testing::Values(kKilled), testing::Values(1, 2)));
INSTANTIATE_TEST_SUITE_P(How, EarlyEnd,
                         testing::Combine(testing::Values(2), testing::Values(kExited, kReplaced), testing::Values(1)));

/// `hosts`: ranks are assigned by turns. The only other rank on the host of the one that ends sees it end, and notifies
/// the others through the store.
TEST_P(EarlyEnd, IsNamedByAllWhoWait) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const auto& [victim, end, hosts] = GetParam();
  FolderStore store;
  const auto endings = as_processes(kRanks - 1, [&, victim = victim, end = end, hosts = hosts](int rank) {
    GroupOptions own = options("early", rank, kRanks);
    own.host = "host" + std::to_string(rank % hosts);
    const auto began = Clock::now();
    if (rank == victim) std::thread([end] { std::this_thread::sleep_for(kDelay), end.act(); }).detach();
    const std::string error = set_up_error(store, own);
    EXPECT_LT(Clock::now() - began, kDelay + milliseconds(1500)) << error;
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(end.expected), std::string::npos) << error;
  });
  for (size_t r = 0; r < endings.size(); ++r) EXPECT_TRUE(int(r) == victim || endings[r].well()) << r;
}

/// Returns once this process has published its address for the other hosts, in the first set-up of four ranks.
void await_own_address(Store& store, int rank) {
  const auto is_own = [&](int place) {
    const auto value = store.get(key_in(1, "hosts/4/" + std::to_string(place)), milliseconds(0));
    return value && decode({value->data(), sizeof(Hello)}, 1).front().rank == rank;
  };
  const auto end = Clock::now() + std::chrono::seconds(60);
  for (int place = 0; !is_own(place) && Clock::now() < end; place = (place + 1) % 4)
    std::this_thread::sleep_for(milliseconds(5));
}

/// The ranks' global ranks are not known in a group that a program makes without torch. A part of the job is made of
/// ranks that share no group of nvx, if the group of the whole job is another backend's.
enum class Kind { kUnknown, kWholeJob, kPartOfJob };
void PrintTo(Kind kind, std::ostream* out) {
  *out << (kind == Kind::kUnknown ? "unknown" : kind == Kind::kWholeJob ? "whole job" : "part of the job");
}

class LoneEnd : public testing::TestWithParam<std::tuple<int, Kind, int>> {};
INSTANTIATE_TEST_SUITE_P(Rank, LoneEnd,
                         testing::Combine(testing::Values(0, 1),
                                          testing::Values(Kind::kUnknown, Kind::kWholeJob, Kind::kPartOfJob),
                                          testing::Values(3)));
INSTANTIATE_TEST_SUITE_P(WithoutRank0, LoneEnd,
                         testing::Combine(testing::Values(1, 2),
                                          testing::Values(Kind::kUnknown, Kind::kWholeJob, Kind::kPartOfJob),
                                          testing::Values(0)));

/// Every rank is alone on its host, and one never comes. No process of the victim's host can notify the others.
TEST_P(LoneEnd, IsNamedByTheRanksOfOtherHosts) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  if (const std::string why = net::test::why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  const auto& [victim, kind, absent] = GetParam();
  FolderStore store;
  const auto endings = as_processes(4, [&, victim = victim, kind = kind, absent = absent](int rank) {
    if (rank == absent) return;
    GroupOptions own = options("lone", rank, 4);
    own.host = "host" + std::to_string(rank);
    own.whole_job = kind == Kind::kWholeJob;
    if (kind != Kind::kUnknown) own.global_ranks = {0, 1, 2, 3};
    if (rank == victim) {
      std::thread([&store, rank] {
        await_own_address(store, rank);
        // By then it is connected: a UCX before 1.14 may abort if it is connecting to a process that ends.
        std::this_thread::sleep_for(3 * kDelay);
        raise(SIGKILL);
      }).detach();
    }
    const std::string error = set_up_error(store, own);
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(" is lost: "), std::string::npos) << error;
    EXPECT_NE(error.find(" while group lone was being created"), std::string::npos) << error;
  });
  for (size_t r = 0; r < endings.size(); ++r) EXPECT_TRUE(int(r) == victim || endings[r].well()) << r;
}

/// The ranks know each other from an earlier group of the whole job, and the victim does not join the next. With
/// three ranks, rank 0 comes only when another rank has named the victim.
class EndBetweenGroups : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EndBetweenGroups, testing::Values(2, 3));

TEST_P(EndBetweenGroups, OfARankOfAnotherHostIsNamed) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  if (const std::string why = net::test::why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  FolderStore first, second;
  const int ranks = GetParam(), victim = ranks - 1;
  const auto endings = as_processes(ranks, [&](int rank) {
    GroupOptions own = options("first", rank, ranks);
    own.host = "host" + std::to_string(rank);
    own.whole_job = true;
    for (int r = 0; r < ranks; ++r) own.global_ranks.push_back(uint64_t(r));
    Group group(first, own);
    EXPECT_TRUE(barrier(group).ok());  // it connects all ranks
    first.add("through", 1);
    if (rank == victim) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return first.add("through", 0) == ranks; }));
      raise(SIGKILL);
    }
    own.name = "second";
    own.whole_job = false;
    if (rank == 0 && ranks == 3) {
      EXPECT_TRUE(first.get("named", milliseconds(20'000)));
    }
    const std::string error = set_up_error(second, own);
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(" is lost: "), std::string::npos) << error;
    first.set("named", {1});
  });
  for (int r = 0; r < victim; ++r) EXPECT_TRUE(endings[size_t(r)].well()) << r;
}

TEST(SetUp, ARankOfAnotherHostThatHasDestroyedTheJobsGroupIsNamed) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  if (const std::string why = net::test::why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  FolderStore first, second;
  const auto endings = as_processes(2, [&](int rank) {
    GroupOptions own = options("first", rank, 2);
    own.host = "host" + std::to_string(rank);
    own.whole_job = true;
    own.global_ranks = {0, 1};
    auto group = std::make_unique<Group>(first, own);
    EXPECT_TRUE(barrier(*group).ok());
    if (rank == 1) {
      group.reset();
      return (void)first.get("named", milliseconds(70'000));
    }
    own.name = "second";
    own.whole_job = false;
    const std::string error = set_up_error(second, own);
    EXPECT_NE(error.find("rank 1 (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(") has destroyed the group of the whole job, while group second"), std::string::npos) << error;
    first.set("named", {1});
  });
  for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
}

/// Ends the process before it adds to that key, and reports it.
class EndingStore final : public Store {
 public:
  EndingStore(Store& store, std::string last) : store_(store), last_(std::move(last)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_.set(key, value); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    return store_.get(key, span);
  }
  int64_t add(const std::string& key, int64_t n) override {
    if (n == 0 || key != last_) return store_.add(key, n);
    store_.set("ends", {1});
    raise(SIGKILL);
    return 0;
  }

 private:
  Store& store_;
  const std::string last_;
};

class EndInALaterGroup : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rank, EndInALaterGroup, testing::Values(0, 1));

/// Ranks, each alone on its host, have made a group, left it, and make it again over the same store. The victim comes
/// first, and the others come when it has ended.
TEST_P(EndInALaterGroup, IsNamedByAll) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  if (const std::string why = net::test::why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  const int victim = GetParam();
  FolderStore store;
  const auto endings = as_processes(3, [&](int rank) {
    GroupOptions own = options("again", rank, 3);
    own.host = "host" + std::to_string(rank);
    EXPECT_TRUE(barrier(*std::make_unique<Group>(store, own)).ok());
    store.add("left", 1);
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return store.add("left", 0) == 3; }));
    EndingStore its_last(store, rank == victim ? generation_of(rank) : "");
    if (rank != victim) {
      EXPECT_TRUE(store.get("ends", milliseconds(20'000)));
    }
    const std::string error = set_up_error(its_last, own);
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(" is lost: "), std::string::npos) << error;
  });
  for (size_t r = 0; r < endings.size(); ++r) EXPECT_TRUE(int(r) == victim || endings[r].well()) << r;
}

class KnownEnd : public testing::TestWithParam<std::tuple<int, int>> {};
INSTANTIATE_TEST_SUITE_P(Rank, KnownEnd, testing::Combine(testing::Values(0, 1), testing::Values(1, 3)));

/// The ranks know each other from an earlier group, which the victim's end has failed, and make the next one with the
/// victim. No rank has global ranks.
TEST_P(KnownEnd, IsNamedAtOnceInTheNextGroup) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const auto& [victim, hosts] = GetParam();
  if (const std::string why = net::test::why_no_ucx(); hosts > 1 && !why.empty()) GTEST_SKIP() << why;
  FolderStore first, second;
  const auto endings = as_processes(3, [&, victim = victim, hosts = hosts](int rank) {
    GroupOptions own = options("first", rank, 3);
    own.host = "host" + std::to_string(rank % hosts);
    Group group(first, own);
    EXPECT_TRUE(barrier(group).ok());
    first.add("through", 1);  // the barrier may end on the victim before its last message has left
    if (rank == victim) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return first.add("through", 0) == 3; }));
      raise(SIGKILL);
    }
    EXPECT_FALSE(barrier(group).ok());
    own.name = "second";
    own.processes = group.processes();
    const auto began = Clock::now();
    const std::string error = set_up_error(second, own);
    EXPECT_LT(Clock::now() - began, milliseconds(2000)) << error;
    EXPECT_NE(error.find("rank " + std::to_string(victim) + " (pid "), std::string::npos) << error;
    EXPECT_NE(error.find(hosts > 1 ? " is lost: " : " has ended (signal 9)"), std::string::npos) << error;
  });
  for (size_t r = 0; r < endings.size(); ++r) EXPECT_TRUE(int(r) == victim || endings[r].well()) << r;
}

/// A connection may be lost, and its process live and come.
TEST(SetUp, ARankWhoseConnectionWasLostIsPingedOverANewOne) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  if (const std::string why = net::test::why_no_ucx(); !why.empty()) GTEST_SKIP() << why;
  FolderStore first, second;
  const auto endings = as_processes(2, [&](int rank) {
    GroupOptions own = options("first", rank, 2);
    own.host = "host" + std::to_string(rank);
    Group group(first, own);
    EXPECT_TRUE(barrier(group).ok());
    first.set("through/" + std::to_string(rank), {1});
    EXPECT_TRUE(first.get("through/" + std::to_string(1 - rank), milliseconds(20'000)));  // before the abort
    if (rank == 0) {
      MutexLock lock(group.core().port->mutex());
      group.core().port->disconnect(1);
    }
    group.abort("by a test");
    own.name = "second";
    own.processes = group.processes();
    if (rank == 1) std::this_thread::sleep_for(kDelay);
    Group next(second, own);
    EXPECT_TRUE(barrier(next).ok());
  });
  for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
}

/// A rank that could not make its memory reports it to the others, and does not try again.
TEST(SetUp, ChecksForDeathsWithoutMemoryOfItsOwn) {
  MemoryStore store;
  GroupOptions own = options("without", 0, 2);
  own.global_ranks = {0, 1};
  EXPECT_FALSE(HostSetUp(store, own).has_ended(1));
  EXPECT_EQ(ShmRegistry::opened(), nullptr);
  const auto shm = ShmRegistry::instance();
  EXPECT_EQ(ShmRegistry::opened(), shm);
}

/// The log of what `act` does.
template <class Act>
std::string log_of(Act act) {
  testing::internal::CaptureStderr();
  act();
  return testing::internal::GetCapturedStderr();
}

/// The ranks of its host get the reason through a descriptor, those of other hosts through the store.
TEST(SetUp, ALeaderOfAHostWithoutDescriptorsLeavesItsNoteInTheStore) {
  if (is_sanitized()) GTEST_SKIP() << "UBSan checks objects through a pipe, for which there are no descriptors";
  MemoryStore store;
  rlimit allowed{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &allowed), 0);
  GroupOptions leader = options("few", 1, 3);
  leader.host = "host1";
  leader.aborted = [&, began = Clock::now()] {
    if (Clock::now() - began < kDelay) return false;
    const rlimit none{0, allowed.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    return true;
  };
  const std::string error = set_up_error(store, leader);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &allowed), 0);
  EXPECT_NE(error.find("group few was aborted on rank 1"), std::string::npos) << error;
  GroupOptions other = options("few", 2, 3);
  other.host = "host2";
  other.timeout = std::chrono::seconds(3);
  const std::string cause = set_up_error(store, other);
  EXPECT_NE(cause.find("group few was aborted on rank 1"), std::string::npos) << cause;
}

TEST(SetUp, NamesMissingRanksFromTimeToTime) {
  MemoryStore store;
  GroupOptions alone = options("waiting", 1, 3);
  alone.host = "host";
  alone.timeout = milliseconds(1000);
  alone.reminder = milliseconds(300);
  const std::string log = log_of([&] { (void)set_up_error(store, alone); });
  EXPECT_NE(log.find("group waiting of 3 ranks is not complete after 0."), std::string::npos) << log;
  EXPECT_NE(log.find(": ranks 0, 2 have not joined"), std::string::npos) << log;
  EXPECT_NE(log.find("; this is rank 1 (host host)"), std::string::npos) << log;
  size_t lines = 0;
  for (size_t at = 0; (at = log.find("is not complete", at)) != std::string::npos; ++at) ++lines;
  EXPECT_EQ(lines, 3u) << log;
}

/// Rank 1 lives, and does not join the second group.
TEST(SetUp, NamesTheProcessOfAMissingRankThatAnEarlierGroupHasMet) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  for (const int hosts : {1, 2}) {
    if (hosts == 2 && !net::test::why_no_ucx().empty()) break;
    FolderStore first, second;
    const auto endings = as_processes(2, [&](int rank) {
      GroupOptions own = options("first", rank, 2);
      own.host = "host" + std::to_string(rank % hosts);
      own.whole_job = true;
      own.global_ranks = {0, 1};
      Group group(first, own);
      own.name = "second";
      own.whole_job = false;
      own.timeout = milliseconds(300);
      if (rank == 1) return (void)first.get("rank 0 has given up", milliseconds(20'000));
      const std::string error = set_up_error(second, own);
      EXPECT_NE(error.find(": rank 1 (pid "), std::string::npos) << error;
      EXPECT_NE(error.find(", host " + std::string(hosts == 2 ? "host1" : "host0") + ") has not joined;"),
                std::string::npos)
          << error;
      first.set("rank 0 has given up", {1});
    });
    for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
  }
}

TEST(SetUp, WarnsOfAStoppedRank) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(2, [&](int rank) {
    GroupOptions own = options("stopped", rank, 3);
    own.timeout = milliseconds(2'500);
    if (rank == 1) {
      const pid_t self = getpid();
      std::thread([self] { std::this_thread::sleep_for(kDelay), kill(self, SIGSTOP); }).detach();
      if (fork() == 0) {  // wakes it
        std::this_thread::sleep_for(milliseconds(2'000));
        _exit(kill(self, SIGCONT));
      }
    }
    const std::string log = log_of([&] { (void)set_up_error(store, own); });
    if (rank == 1) return;
    EXPECT_NE(log.find("rank 1 (pid "), std::string::npos) << log;
    EXPECT_NE(log.find(" is stopped by a signal (state T); this rank waits for it to create group stopped"),
              std::string::npos)
        << log;
    EXPECT_NE(log.find(" runs again; "), std::string::npos) << log;
  });
  for (const Ending& ending : endings) EXPECT_TRUE(ending.well());
}

/// A rank that creates the group with another number of ranks is refused as soon as rank 0 sees it.
TEST(SetUp, RanksThatCountDifferentlyAreRefusedThoughAnotherIsMissing) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    const auto began = Clock::now();
    const std::string error = set_up_error(store, options("sizes", rank, rank == 0 ? 4 : 3));
    EXPECT_LT(Clock::now() - began, milliseconds(1500));
    EXPECT_NE(error.find(") creates this group with 3 ranks, rank 0 with 4"), std::string::npos) << error;
  });
}

/// Rank 0 usually serves the store, which ends with it.
TEST(SetUp, RankZeroWaitsAMomentForOneThatIsAboutToJoin) {
  MemoryStore store;
  std::atomic<bool> came{false};
  const auto gave_up = [&] {
    return std::ranges::any_of(store.keys(), [](const std::string& key) { return key.ends_with("/failure"); });
  };
  as_threads(2, [&](int rank) {
    GroupOptions own = options("late", rank, 2);
    if (rank == 0) own.tune = "no such key";
    for (const auto end = Clock::now() + std::chrono::seconds(10); rank == 1 && !gave_up() && Clock::now() < end;)
      std::this_thread::sleep_for(milliseconds(1));
    if (rank == 1) came = true;
    const std::string error = set_up_error(store, own);
    EXPECT_TRUE(came) << rank;
    EXPECT_NE(error.find("no such key"), std::string::npos) << error;
  });
}

/// As when ranks call new_group() in different orders: ranks of two groups come together under one name.
TEST(SetUp, RanksOfDifferentGroupsAreRefused) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    GroupOptions own = options("1", rank, 2);
    own.global_ranks = rank == 0 ? std::vector<uint64_t>{0, 1} : std::vector<uint64_t>{2, 3};
    const std::string error = set_up_error(store, own);
    EXPECT_NE(error.find(") creates group 1 for other global ranks than rank 0"), std::string::npos) << error;
    EXPECT_NE(error.find("in the same order on all ranks (new_group)"), std::string::npos) << error;
  });
}

}  // namespace
}  // namespace nvx::test
