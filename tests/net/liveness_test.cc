// Signs of life of peers, and reports of failures: what this process learns and tells.

#include <gtest/gtest.h>

#include "net/alone.h"

namespace nvx::test {
namespace {

TEST(FailureReport, AFailureComesWithItsFactsAndIsThisRanksOwn) {
  Begun alone;
  const Failure late{.code = Code::kTimeout, .cause = "timed out", .context = "there", .awaited = {0, 2}};
  alone.come({from_rank(Kind::kPoison, FailureNote::of(late).used())});
  const auto reported = alone.reported();
  ASSERT_TRUE(reported);
  EXPECT_EQ(reported->by, 1);
  EXPECT_EQ(reported->failure.cause, "timed out");
  EXPECT_EQ(reported->failure.context, "");
  EXPECT_EQ(reported->failure.code, Code::kTimeout);
  EXPECT_EQ(reported->failure.reported_code(), Code::kPeerFailed);
  EXPECT_EQ(reported->failure.awaited, (std::vector<int>{0, 2}));
}

/// A report to a process that is stopped stays in the link.
TEST(FailureReport, AFailedGroupDoesNotWaitForTheReportsOfOthers) {
  using std::chrono::milliseconds;
  Begun alone;
  alone.begin_group(kGroup + 1);
  alone.link().reads_posts = false;
  EXPECT_GE(alone.report_failure(kGroup, {1}), milliseconds(200));
  EXPECT_LT(alone.report_failure(kGroup + 1, {}), milliseconds(190));
}

/// A damaged report of another group's failure is ignored.
TEST(FailureReport, AFailureWhoseNoteIsDamagedIsOneAllTheSame) {
  const Failure lost{.code = Code::kPeerDied, .cause = "is lost", .lost_rank = 3};  // of ranks 0 to 2
  const FailureNote note = FailureNote::of(lost);
  for (const size_t bytes : {size_t(0), size_t(20), note.used().size() - 1, note.used().size()}) {
    Begun alone;
    alone.come({from_rank(Kind::kOtherFailure, note.used().first(bytes))});
    EXPECT_EQ(alone.other_failure(1), "");
    alone.come({from_rank(Kind::kPoison, note.used().first(bytes))});
    const auto reported = alone.reported();
    ASSERT_TRUE(reported);
    EXPECT_EQ(reported->failure.cause, "the failure note of rank 1 is damaged or from another version of nvx");
    EXPECT_EQ(reported->failure.lost_rank, kNoRank);
  }
}

TEST(Signs, ReceivedSegmentsAreAnsweredWithoutAPing) {
  Begun alone;
  EXPECT_FALSE(pong(alone.link(), 1));
  alone.come({alone.segment(0), alone.segment(1)});
  EXPECT_TRUE(pong(alone.link(), 1)) << "a pong would arrive after all data that is on its way";
  alone.link().sent.clear();
  alone.come({alone.segment(2)});
  EXPECT_FALSE(pong(alone.link(), 1)) << "once a second is enough";
}

TEST(Signs, AProcessThatWasDeclaredLostGetsTheReasonWhenItPings) {
  Begun alone;
  alone.link().to_lose.push_back(0);
  alone.advance();
  alone.link().sent.clear();
  alone.come({from_process(Kind::kPing, 0), from_process(Kind::kPing, 0)});
  EXPECT_EQ(pong(alone.link(), 2), "the test says so");
  EXPECT_EQ(alone.link().sent.size(), 1u) << "once";
}

/// The group's port exists before the group knows the processes of its ranks, so a peer may be faster.
TEST(Signs, AProcessDeclaredLostThatPingsANewGroupGetsNoReason) {
  Begun alone;
  alone.link().to_lose.push_back(0);
  alone.advance();
  alone.begin_group(kGroup + 1);
  alone.link().sent.clear();
  Sent ping = from_process(Kind::kPing, 0);
  MessageHeader header = ping.read();
  header.group = kGroup + 1;
  std::memcpy(ping.header.data(), &header, sizeof header);
  alone.come({ping});
  EXPECT_FALSE(pong(alone.link(), 2)) << "it is about to connect to it";
}

/// The answer concerns one group only.
TEST(Signs, EachGroupOfAProcessPingsAPeer) {
  Begun alone;
  const auto pings = [&] {
    return std::ranges::count_if(alone.link().sent, [](const Sent& sent) { return sent.read().kind == Kind::kPing; });
  };
  alone.ping();
  alone.ping();
  EXPECT_EQ(pings(), 1) << "once a second";
  alone.begin_group(kGroup + 1);
  alone.ping_from_group_begun();
  EXPECT_EQ(pings(), 2);
}

TEST(Signs, ProcessLosesAPeerThatHasDeclaredItLost) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "has been silent", 1)});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_EQ(departure->why, "has declared this process lost: has been silent");
}

TEST(Signs, PeersReasonIsCutToOnePrintableLine) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "a\nb\x1b[2J\xff" + std::string(5000, 'x'), 1)});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_NE(departure->why.find("lost: a b [2J?xxx"), std::string::npos) << departure->why;
  EXPECT_LT(departure->why.size(), 1200u);
}

/// A report that arrived from rank 1 before it was lost, and this process's report to it.
TEST(Signs, FailuresOfOtherGroupsAreReportedOnceToWaitingRanks) {
  Begun alone;
  alone.come({from_rank(Kind::kOtherFailure, FailureNote::of({Code::kTimeout, "its group 9 had failed\n"}).used())});
  EXPECT_EQ(alone.other_failure(1), "its group 9 had failed ");
  EXPECT_EQ(alone.other_failure(2), "");
  EXPECT_FALSE(alone.departure()) << "it is there all the same";
  const auto reports = [&] {
    return std::count_if(alone.link().sent.begin(), alone.link().sent.end(),
                         [](const Sent& sent) { return sent.read().kind == Kind::kOtherFailure; });
  };
  alone.report_other_failure("another one");
  EXPECT_EQ(reports(), 1) << "to rank 1, which has received a message";
  const Sent ping = from_process(Kind::kPing, 0);
  alone.come({ping, ping});
  EXPECT_EQ(reports(), 1);
}

/// Rank 1 has given up a wait for these ranks 250 ms ago.
TEST(Signs, ATimeoutOfAnotherGroupNamesTheAwaitedRankAndTheTime) {
  for (const int awaited : {0, 2}) {
    Begun alone;
    const FailureNote note = FailureNote::of({.code = Code::kTimeout, .cause = "timed out", .awaited = {awaited}});
    Sent report = from_rank(Kind::kOtherFailure, note.used());
    MessageHeader header = report.read();
    header.value = 250;
    std::memcpy(report.header.data(), &header, sizeof header);
    const auto now = Clock::now();
    alone.come({report});
    const auto when = alone.gave_up_wait_at();
    ASSERT_EQ(when.has_value(), awaited == 0);
    if (when) {
      EXPECT_GE(*when, now - std::chrono::milliseconds(250));
      EXPECT_LT(*when, Clock::now() - std::chrono::milliseconds(249));
    }
  }
}

TEST(Signs, ALatePingGetsAnEarlierFailure) {
  Alone alone;
  alone.report_other_failure("another one");
  EXPECT_TRUE(alone.link().sent.empty()) << "nobody waits";
  alone.link().to_come.push_back(from_process(Kind::kPing, 0));
  alone.progress();
  ASSERT_EQ(alone.link().sent.size(), 2u);
  EXPECT_EQ(alone.link().sent[1].read().kind, Kind::kOtherFailure);
}

/// Otherwise every later call would wait for the lock without end.
TEST(Signs, ALinkThatThrowsLeavesTheLockFree) {
  auto* const link = new ScriptedLink(kSegment);
  net::Messenger messenger(std::unique_ptr<net::Link>(link), std::chrono::milliseconds(300));
  const auto set_throws = [&](bool throws) {
    MutexLock lock(messenger.mutex());
    link->throws = throws;
  };
  set_throws(true);
  bool threw = false;
  while (!threw) {
    try {
      messenger.try_progress();
    } catch (const std::bad_alloc&) {
      threw = true;
    }
  }
  set_throws(false);
  EXPECT_FALSE(messenger.try_progress()) << "nothing moved";
}

/// At process exit, waiting for an answer uses no CPU time.
TEST(Signs, TheEndOfAProcessSleepsWhileItWaits) {
  auto* const link = new ScriptedLink(kSegment);
  const auto messenger =
      std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(link), std::chrono::milliseconds(300));
  {
    net::GroupPort port(messenger, kGroup, 0, 2);
    MutexLock lock(messenger->mutex());
    port.mutex().held_by_caller();
    port.connect(1, Bytes(16));
    port.send(1, {Kind::kMonitorIn, 1});
  }
  const auto began = Clock::now();
  messenger->finish();
  EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(290)) << "nobody has answered";
  messenger->close();
  EXPECT_LT(link->looks, 900u);
}

/// An answer to a ping from before this group concerns an earlier one, even if this group has pinged since.
TEST(Signs, EarlierGroupsLossDoesNotCountNow) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "has been silent")});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_FALSE(departure->left());
  EXPECT_EQ(departure->why, "has declared this process lost: has been silent") << "in that group";
  EXPECT_EQ(alone.lost_because(), "") << "not the process";
}

/// Its process may live, and connects anew for a group that it makes with this one.
TEST(Signs, AConnectionThatWasGivenUpIsNoLossToTheSetUpOfAGroup) {
  Begun alone;
  EXPECT_EQ(alone.how_lost(), "");
  alone.disconnect();
  EXPECT_NE(alone.lost_because(), "");
  EXPECT_EQ(alone.how_lost(), "");
}

TEST(Signs, AProcessThatHasDeclaredThisOneLostIsNoLossToTheSetUpOfAGroup) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "has been silent", 1)});
  EXPECT_NE(alone.lost_because(), "");
  EXPECT_EQ(alone.how_lost(), "");
}

TEST(Signs, AConnectionThatHasEndedIsALossToTheSetUpOfAGroup) {
  Begun alone;
  alone.link().to_lose.push_back(0);
  alone.advance();
  EXPECT_EQ(alone.how_lost(), "(there) is lost: the test says so");
}

/// Otherwise the link would have two connections to the process.
TEST(Signs, ALostPeerIsForgottenBeforeItsProcessIsAddedAgain) {
  Begun alone;
  alone.disconnect();
  EXPECT_EQ(alone.link().forgotten, 0u);
  alone.connect(1);
  EXPECT_EQ(alone.link().forgotten, 1u);
}

}  // namespace
}  // namespace nvx::test
