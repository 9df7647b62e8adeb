// The faults of the loopback link: each has the effect of its name, and the same seed does the same.

#include <algorithm>

#include "net/ends.h"

namespace nvx::net::test {
namespace {

/// Two ends that know each other as peer 0, over a net with these faults.
struct LoopbackPair {
  explicit LoopbackPair(const Faults& faults, uint64_t seed = 1, size_t place_above = 64 << 10)
      : net({.seed = seed, .faults = faults, .place_above = place_above}), a(net.open()), b(net.open()) {
    a.link->add(b.link->address());
    b.link->add(a.link->address());
  }
  /// The order in which so many messages arrive, by number.
  std::vector<uint32_t> run(uint32_t messages, int rounds) {
    for (uint32_t i = 0; i < messages; ++i) a.send(0, 100 + i, i);
    for (int i = 0; i < rounds; ++i) {
      a.link->progress();
      b.link->progress();
    }
    std::vector<uint32_t> order;
    for (const EventLog::Message& message : b.log.messages) {
      uint32_t number = 0;
      std::memcpy(&number, message.header.data(), sizeof number);
      order.push_back(number);
    }
    return order;
  }

  LoopbackNet net;
  End a, b;
};

std::vector<uint32_t> numbers(uint32_t count) {
  std::vector<uint32_t> made(count);
  for (uint32_t i = 0; i < count; ++i) made[i] = i;
  return made;
}

TEST(Loopback, WithoutFaultsKeepsTheOrder) { EXPECT_EQ(LoopbackPair({}).run(100, 1), numbers(100)); }

TEST(Loopback, DelaysReorderButLoseNothing) {
  for (const Faults& faults : {Faults{.most_delay = 5}, Faults{.reorder = 0.3}}) {
    std::vector<uint32_t> order = LoopbackPair(faults).run(100, 7);
    EXPECT_NE(order, numbers(100));
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, numbers(100));
  }
}

TEST(Loopback, TheSameSeedDoesTheSame) {
  const Faults faults{.most_delay = 9, .reorder = 0.2, .duplicate = 0.1, .truncate = 0.1, .lose = 0.1};
  const std::vector<uint32_t> once = LoopbackPair(faults, 7).run(200, 10);
  EXPECT_EQ(LoopbackPair(faults, 7).run(200, 10), once);
  EXPECT_NE(LoopbackPair(faults, 8).run(200, 10), once);
}

TEST(Loopback, LosesDuplicatesAndTruncatesAShare) {
  LoopbackPair lossy({.lose = 0.25});
  const size_t arrived = lossy.run(1000, 2).size();
  EXPECT_NEAR(double(arrived), 750, 60);
  EXPECT_EQ(lossy.net.counts().lost, 1000 - arrived);
  EXPECT_TRUE(lossy.a.all_done_once());
  EXPECT_EQ(lossy.a.log.failures, 0u) << "a sender does not know what is lost";

  LoopbackPair doubled({.duplicate = 0.25});
  EXPECT_NEAR(double(doubled.run(1000, 2).size()), 1250, 60);

  LoopbackPair shortened({.truncate = 0.25});
  shortened.run(1000, 2);
  size_t shorter = 0;
  for (size_t i = 0; i < 1000; ++i) shorter += shortened.b.log.messages[i].body.size() < 100 + i;
  EXPECT_NEAR(double(shorter), 250, 60);
  EXPECT_EQ(shorter, shortened.net.counts().truncated);
}

TEST(Loopback, DelayCountsCallsOfProgress) {
  LoopbackPair pair({.most_delay = 3});
  for (uint32_t i = 0; i < 64; ++i) pair.a.send(0, 10, i);
  std::vector<size_t> arrived;
  for (int i = 0; i < 5; ++i) {
    pair.b.link->progress();
    arrived.push_back(pair.b.log.messages.size());
  }
  EXPECT_TRUE(std::is_sorted(arrived.begin(), arrived.end()));
  EXPECT_LT(arrived[0], 64u);
  EXPECT_EQ(arrived[2], 64u) << "at most three calls late, of which the first is one";
}

TEST(Loopback, LatencyTakesTimeAndEndsASleep) {
  LoopbackPair pair({.latency = milliseconds(30)});
  const auto began = Clock::now();
  pair.a.send(0, 10);
  while (pair.b.log.messages.empty()) {
    if (!pair.b.link->progress() && pair.b.link->arm()) pair.b.link->sleep(std::chrono::seconds(5));
  }
  EXPECT_GE(Clock::now() - began, milliseconds(30));
  EXPECT_LT(Clock::now() - began, milliseconds(3000));
}

TEST(Loopback, ASlowWayTakesManyCalls) {
  LoopbackPair pair({.bytes_per_progress = 1000});
  for (uint32_t i = 0; i < 10; ++i) pair.a.send(0, 600, i);
  int calls = 0;
  while (pair.b.log.messages.size() < 10 && calls < 100) {
    pair.b.link->progress();
    ++calls;
  }
  EXPECT_EQ(calls, 5) << "two messages of 600 bytes a call";
}

TEST(Loopback, ACutIsNoticedByBothAndOnce) {
  LoopbackPair pair({.cut_after = 5});
  const std::vector<uint32_t> order = pair.run(20, 3);
  EXPECT_LE(order.size(), 5u);
  EXPECT_EQ(pair.a.log.losses[0], 1);
  EXPECT_EQ(pair.b.log.losses[0], 1);
  EXPECT_TRUE(pair.a.all_done_once());
  EXPECT_GE(pair.a.log.failures, 15u);
  pair.net.cut(0, 1);
  pair.run(1, 1);
  EXPECT_EQ(pair.a.log.losses[0], 1);
}

TEST(Loopback, AKilledLinkSendsNothingMore) {
  LoopbackPair pair({}, 1, /*place_above=*/1000);
  pair.a.send(0, 5000, 1);
  pair.b.send(0, 5000, 2);
  pair.net.kill(0);
  pair.b.link->progress();
  EXPECT_EQ(pair.b.log.losses[0], 1);
  EXPECT_TRUE(pair.b.all_done_once());
  EXPECT_EQ(pair.b.log.failures, 1u);
  pair.a.send(0, 10, 3);
  EXPECT_FALSE(pair.a.link->progress());
  EXPECT_EQ(pair.a.log.ended, 0u) << "it is dead";
  pair.a.link->close();
  EXPECT_TRUE(pair.a.all_done_once());
  EXPECT_TRUE(pair.b.log.messages.empty());
}

TEST(Loopback, AFetchedBodyIsReadWhenItArrives) {
  LoopbackPair pair({.most_delay = 4}, 1, /*place_above=*/10);
  pair.a.send(0, 1000, 1);
  pair.a.link->progress();
  EXPECT_FALSE(pair.a.all_done_once());
  for (int i = 0; i < 6; ++i) pair.b.link->progress();
  ASSERT_EQ(pair.b.log.messages.size(), 1u);
  EXPECT_TRUE(pair.b.log.messages[0].placed);
  EXPECT_EQ(pair.b.log.messages[0].body, pattern(1000, 1));
  pair.a.link->progress();
  EXPECT_TRUE(pair.a.all_done_once());
}

TEST(Loopback, APlaceIsGivenBackWhenItsSenderGoes) {
  LoopbackPair pair({}, 1, /*place_above=*/10);
  pair.a.send(0, 1000, 1);
  pair.b.log.on_place = [&] { pair.net.cut(0, 1); };
  pair.b.link->progress();
  pair.b.link->progress();
  EXPECT_EQ(pair.b.log.drops, 1u);
  EXPECT_TRUE(pair.b.log.messages.empty());
  EXPECT_EQ(pair.b.log.losses[0], 1);
}

}  // namespace
}  // namespace nvx::net::test
