// One run beside a peer that breaks the protocol or ends: what the run reports, and which memory it accesses
// afterwards.

#include <gtest/gtest.h>

#include "net/alone.h"

namespace nvx::test {
namespace {

using Cause = net::ScheduleRun::Verdict::Cause;

/// Nobody could take it back when the run ends.
TEST(RunFaults, AMessageOfALostPeerGetsNoPlace) {
  for (const bool lost : {false, true}) {
    Alone alone("binomial", Collective::kBroadcast);
    alone.link().fetches = true;
    alone.link().minds_forget = !lost;
    alone.begin();
    if (lost) alone.link().to_lose.push_back(0);
    alone.come({alone.segment(0)});
    EXPECT_EQ(alone.link().open_fetches(), lost ? 0u : 1u);
    alone.link().minds_forget = true;
  }
}

/// Between a waiter's look at its run and its check of the peers, another thread may drive the link.
TEST(RunFaults, ARankThatLeavesAfterItHasSentAllIsNotLost) {
  Alone alone("pair", Collective::kAllReduce, Memory::kShared);
  alone.link().reads_posts = false;  // what rank 1 sends would overwrite what has not been sent yet
  alone.begin();
  EXPECT_EQ(alone.come({alone.segment(0), alone.segment(1), alone.segment(2)}), Progress::kPending);
  alone.link().reads_posts = true;
  alone.progress();
  alone.link().to_lose.push_back(0);
  alone.progress();
  alone.check_peers();
  EXPECT_EQ(alone.advance(), Progress::kDone);
}

TEST(RunFaults, AnyOrderOfSegmentsIsRight) {
  Begun alone;
  EXPECT_EQ(alone.come({alone.segment(2), alone.segment(0)}), Progress::kPending);
  EXPECT_EQ(alone.run().waits_for(), std::vector<int>{1});
  EXPECT_EQ(alone.come({alone.segment(1)}), Progress::kDone);
}

TEST(RunFaults, AnotherFingerprintIsAMismatchThatNamesIt) {
  Begun alone;
  Sent other = alone.segment(0);
  other.header[sizeof(MessageHeader)] = std::byte(9);
  EXPECT_EQ(alone.come({other}), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kMismatch);
  EXPECT_EQ(alone.run().verdict().rank, 1);
  EXPECT_EQ(alone.run().verdict().theirs, fingerprint(9));
}

TEST(RunFaults, AnotherLengthIsReported) {
  Begun alone;
  EXPECT_EQ(alone.come({alone.segment(0, 1, 4000)}), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kCounts);
  EXPECT_EQ(alone.run().verdict().mine, Alone::kBytes);
  EXPECT_EQ(alone.run().verdict().other, 4000u);
}

TEST(RunFaults, SegmentOfNoMessageFailsTheRun) {
  const auto verdict_on = [](auto make) {
    Begun alone;
    EXPECT_EQ(alone.come(make(alone)), Progress::kFailed);
    EXPECT_EQ(alone.run().verdict().rank, 1);
    return alone.run().verdict().cause;
  };
  using Messages = std::vector<Sent>;
  EXPECT_EQ(verdict_on([](Alone& a) {
              return Messages{a.segment(0), a.segment(1), a.segment(1)};
            }),
            Cause::kGarbage)
      << "twice the same";
  EXPECT_EQ(verdict_on([](Alone& a) { return Messages{a.segment(0), a.segment(0)}; }), Cause::kGarbage);
  for (const size_t bytes : {size_t(0), size_t(63), size_t(65)}) {
    EXPECT_EQ(verdict_on([&](Alone& a) {
                Sent cut = a.segment(1);
                cut.body.resize(bytes);
                return Messages{cut};
              }),
              Cause::kGarbage)
        << bytes;
  }
  for (const uint32_t number : {3u, 4u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_EQ(verdict_on([&](Alone& a) {
                return Messages{changed(a.segment(1), [&](MessageHeader& h) { h.segment = number; })};
              }),
              Cause::kGarbage)
        << number;
  }
  EXPECT_EQ(
      verdict_on([](Alone& a) { return Messages{changed(a.segment(1), [](MessageHeader& h) { h.segment = 0; })}; }),
      Cause::kGarbage)
      << "the beginning of a message without its fingerprint";
  EXPECT_EQ(verdict_on([](Alone& a) {
              Sent bare = a.segment(0);
              bare.header.resize(sizeof(MessageHeader) + 7);
              return Messages{bare};
            }),
            Cause::kGarbage);
}

/// A message for another run neither fails nor completes this one.
TEST(RunFaults, MessageForAnotherRunChangesNothing) {
  Begun alone;
  std::vector<Sent> all_invalid;
  const auto invalid = [&](auto change) { all_invalid.push_back(changed(alone.segment(0), change)); };
  invalid([](MessageHeader& h) { h.magic ^= 1; });
  invalid([](MessageHeader& h) { h.version += 1; });
  invalid([](MessageHeader& h) { h.kind = Kind(77); });
  invalid([](MessageHeader& h) { h.from = 0; });
  invalid([](MessageHeader& h) { h.from = 3; });
  invalid([](MessageHeader& h) { h.from = 0xffffffff; });
  invalid([](MessageHeader& h) { h.from = 2; });
  invalid([](MessageHeader& h) { h.to = 1; });
  invalid([](MessageHeader& h) { h.group += 1; });
  invalid([](MessageHeader& h) { h.op = 2; });
  invalid([](MessageHeader& h) { h.run = 1; });
  invalid([](MessageHeader& h) { h.message = 1; });
  all_invalid.push_back({Bytes(31), {}});
  all_invalid.push_back({{}, {}});
  for (Kind kind = Kind::kFirst; kind <= Kind::kMonitorOut; kind = Kind(int(kind) + 1)) {
    if (kind == Kind::kPoison || kind == Kind::kFirst || kind == Kind::kNext) continue;
    Sent bare;
    append(bare.header, Alone::header_of(kind));
    all_invalid.push_back(bare);
  }
  EXPECT_EQ(alone.come(all_invalid), Progress::kPending);
  EXPECT_EQ(alone.come({alone.segment(0), alone.segment(1), alone.segment(2)}), Progress::kDone);
  EXPECT_EQ(alone.come({alone.segment(0), alone.segment(1)}), Progress::kDone) << "too late to be distinguished";
}

TEST(RunFaults, ALostPeerIsNamed) {
  for (const bool reads : {true, false}) {
    Alone alone;
    alone.link().reads_posts = reads;
    alone.begin();
    alone.come({alone.segment(0)});
    alone.link().to_lose.push_back(0);
    alone.advance();
    alone.hold();
    alone.run().check_peers();
    EXPECT_EQ(alone.advance(), Progress::kFailed);
    EXPECT_EQ(alone.run().verdict().cause, Cause::kLost);
    EXPECT_EQ(alone.run().verdict().rank, 1);
    EXPECT_NE(alone.departure()->why.find("the test says so"), std::string::npos);
  }
}

/// For AddressSanitizer: the link reads and writes for the last time when it has to forget the peer.
TEST(RunFaults, AbandonedPostsEndInTime) {
  for (const bool minds : {true, false}) {
    Alone alone;
    alone.link().reads_posts = false;
    alone.link().minds_forget = minds;
    alone.begin();
    ASSERT_GT(alone.link().open_posts(), 0u);
    const auto began = Clock::now();
    if (minds) {
      alone.end();
      EXPECT_EQ(alone.link().open_posts(), 0u);
    } else {
      alone.hold();
      net::ScheduleRun* const runs[] = {&alone.run()};
      net::ScheduleRun::abandon(alone.port(), runs);  // the memory stays, because this link breaks its contract
      alone.link().reads_posts = true;
      alone.advance();
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
  }
}

TEST(RunFaults, AbandonedFetchesEndInTime) {
  for (const bool refused : {false, true}) {
    Alone alone("binomial", Collective::kBroadcast);
    alone.link().fetches = true;
    alone.begin();
    alone.come({alone.segment(0), alone.segment(2)});
    ASSERT_EQ(alone.link().open_fetches(), 2u);
    if (refused) {  // the run fails with fetches in flight
      alone.link().fetches = false;
      Sent cut = alone.segment(1);
      cut.body.resize(3);
      EXPECT_EQ(alone.come({cut}), Progress::kFailed);
    }
    const auto began = Clock::now();
    alone.end();
    EXPECT_EQ(alone.link().open_fetches(), 0u);
    EXPECT_LT(Clock::now() - began, std::chrono::milliseconds(1000));
  }
}

/// The memory of a segment is released once the segment has arrived, also if it is refused.
TEST(RunFaults, RefusedFetchesAreOver) {
  Alone alone("binomial", Collective::kBroadcast);
  alone.link().fetches = true;
  alone.begin();
  alone.come({alone.segment(1), alone.segment(1)});
  alone.link().finish_fetches();
  EXPECT_EQ(alone.advance(), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kGarbage);
  alone.end();
  EXPECT_FALSE(alone.departure()) << "waits for fetches that are over, and gives up a peer for them";
}

TEST(RunFaults, FetchedSegmentsAreRight) {
  Alone alone("binomial", Collective::kBroadcast);
  alone.link().fetches = true;
  alone.begin();
  alone.come({alone.segment(2), alone.segment(0), alone.segment(1)});
  alone.link().finish_fetches();
  EXPECT_EQ(alone.advance(), Progress::kDone);
}

/// A segment for an operation that has ended here comes from a rank that called another operation.
TEST(RunFaults, StraysOfAnEndedOperationAreReported) {
  Alone alone;
  alone.hold();
  alone.end_operation(1);
  Sent other = alone.segment(0);
  other.header[sizeof(MessageHeader)] = std::byte(9);
  alone.begin(2);
  alone.come({other, alone.segment(1)});
  const auto late = alone.late_call();
  ASSERT_TRUE(late);
  EXPECT_EQ(late->rank, 1);
  EXPECT_EQ(late->op, 1u);
  EXPECT_EQ(late->fingerprint, fingerprint(9));
  // The same if it arrived early and was never used.
  alone.come({alone.segment(0, 3)});
  EXPECT_FALSE(alone.late_call());
  alone.end_operation(2);
  alone.end_operation(3);
  const auto later = alone.late_call();
  ASSERT_TRUE(later);
  EXPECT_EQ(later->op, 3u);
}

/// A correct peer stops at its credit. One that does not is disconnected before it has filled the memory.
TEST(RunFaults, PeerThatExceedsItsCreditIsDisconnected) {
  for (const bool of_bytes : {true, false}) {
    Begun alone;
    size_t kept = 0;
    alone.hold();
    for (uint32_t op = 2; op < 20'000 && !alone.departure(); ++op) {
      Sent early = alone.segment(0, op);
      early.body.resize(of_bytes ? 64 << 10 : 0);
      alone.come({early});
      kept += early.body.size() + 1;
    }
    ASSERT_TRUE(alone.departure());
    EXPECT_LT(kept, size_t(9) << 20);
    EXPECT_NE(alone.departure()->why.find("more than its credit allows"), std::string::npos) << alone.departure()->why;
  }
}

}  // namespace
}  // namespace nvx::test
