#include "group/core/poller.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>

#include "group/core/thread_pool.h"
#include "support/stores.h"

namespace nvx::test {
namespace {

constexpr Poller::Pace kQuick{std::chrono::microseconds(10), std::chrono::microseconds(10)};

TEST(Poller, PollsUntilNothingIsLeftAndAgainWhenWoken) {
  std::atomic<int> left{0}, looks{0};
  const auto poller = std::make_shared<Poller>(
      [&] {
        ++looks;
        return Poller::Seen{left > 0 && --left > 0, {}};
      },
      kQuick);
  for (int turn = 0; turn < 3; ++turn) {
    left = 5;
    const int before = looks;
    ASSERT_TRUE(poller->wake());
    EXPECT_TRUE(eventually(std::chrono::seconds(30), [&] { return left == 0; }));
    EXPECT_GE(looks - before, 5);
  }
}

/// A poll that has begun may have missed the event that it was woken for.
TEST(Poller, PollsOnceMoreIfWokenDuringAPoll) {
  std::atomic<int> looks{0};
  std::barrier<> in_look(2), woken(2);
  const auto poller = std::make_shared<Poller>(
      [&] {
        if (looks++ == 0) in_look.arrive_and_wait(), woken.arrive_and_wait();
        return Poller::Seen();
      },
      kQuick);
  ASSERT_TRUE(poller->wake());
  in_look.arrive_and_wait();
  ASSERT_TRUE(poller->wake());
  woken.arrive_and_wait();
  EXPECT_TRUE(eventually(std::chrono::seconds(30), [&] { return looks == 2; }));
}

/// An action may be blocked until another poll sees an event.
TEST(Poller, GoesOnPollingWhileAnActIsHeldUp) {
  std::atomic<int> looks{0};
  std::atomic<bool> acted{false};
  const auto poller = std::make_shared<Poller>(
      [&]() -> Poller::Seen {
        const int look = ++looks;
        if (look > 1) return {look < 10, {}};
        return {true, [&] { acted = eventually(std::chrono::seconds(30), [&] { return looks >= 10; }); }};
      },
      kQuick);
  ASSERT_TRUE(poller->wake());
  EXPECT_TRUE(eventually(std::chrono::seconds(60), [&] { return acted.load(); }));
}

TEST(Poller, ReportsWhereThereIsNoThread) {
  ThreadPool::instance().limit(0);
  std::atomic<int> looks{0};
  const auto poller = std::make_shared<Poller>([&] { return ++looks, Poller::Seen(); }, kQuick);
  EXPECT_FALSE(poller->wake());
  ThreadPool::instance().limit(SIZE_MAX);
  EXPECT_TRUE(poller->wake());
  EXPECT_TRUE(eventually(std::chrono::seconds(30), [&] { return looks == 1; }));
}

}  // namespace
}  // namespace nvx::test
