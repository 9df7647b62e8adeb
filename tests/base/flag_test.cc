// Flags and waits: order, wrap, sleep, ring, and that every wait ends.

#include "base/flag.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <ctime>
#include <thread>

#include "support/ranks.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

WaitRules within(milliseconds span, Watch* watch = nullptr) { return {Deadline::after(span), nullptr, watch}; }

TEST(Stamp, ComparesModularly) {
  for (const uint32_t epoch : {0u, 1u, 1u << 31, ~0u - 1}) {
    const Stamp now = stamp(epoch, 5);
    EXPECT_TRUE(reached(now, now));
    EXPECT_TRUE(reached(now, stamp(epoch, 4)));
    EXPECT_FALSE(reached(now, stamp(epoch, 6)));
    EXPECT_FALSE(reached(now, stamp(epoch + 1, 0)));
    EXPECT_TRUE(reached(stamp(epoch + 1, 0), now));
    EXPECT_TRUE(reached(stamp(epoch + 3, 0), stamp(epoch, ~0u)));
  }
}

/// Data written before a signal is visible after the wait, and sleepers are woken. TSan detects a missing order.
TEST(Flag, CarriesWhatWasWrittenBefore) {
  Flag ping{}, pong{};
  int data = 0;
  as_threads(2, [&](int rank) {
    for (Stamp i = 1; i <= 2000; ++i) {
      if (rank == 0) {
        data = int(i);
        signal(ping, i);
        ASSERT_EQ(wait(pong, i, 1, within(milliseconds(20'000))), Waited::kReached);
        ASSERT_EQ(data, int(i) + 1);
      } else {
        ASSERT_EQ(wait(ping, i, 0, within(milliseconds(20'000))), Waited::kReached);
        ASSERT_EQ(data, int(i));
        ++data;
        signal(pong, i);
      }
    }
  });
}

/// The signaller makes no system call without a sleeper, and misses none: thousands of rounds, each far sooner than the
/// watch interval.
TEST(Flag, LosesNoWakeUp) {
  Flag flags[3] = {};
  const auto began = Clock::now();
  as_threads(3, [&](int rank) {
    for (Stamp i = 1; i <= 700; ++i) {
      signal(flags[rank], i);
      for (int r = 0; r < 3; ++r) ASSERT_EQ(wait(flags[r], i, r, within(milliseconds(20'000))), Waited::kReached);
    }
  });
  EXPECT_LT(Clock::now() - began, 700 * kWatchInterval / 2)
      << "wakes were late: only the watch interval ended the sleeps";
  for (const Flag& flag : flags) EXPECT_EQ(flag.sleepers, 0u);
}

TEST(Flag, AWaitEndsAtItsDeadline) {
  Flag flag{};
  for (const int span : {1, 30, 120}) {
    const auto began = Clock::now();
    EXPECT_EQ(wait(flag, Stamp(1), 0, within(milliseconds(span))), Waited::kTimedOut);
    EXPECT_GE(Clock::now() - began, milliseconds(span));
    EXPECT_LT(Clock::now() - began, milliseconds(span + 2000));
  }
}

class Alarm : public Watch {
 public:
  bool should_abort(int peer) override { return peer == 7 && on; }
  void record_abort(int peer) override { recorded = peer; }
  std::atomic<bool> on{false};
  int recorded = -1;
};

/// Records the last report of a wait for peer 3.
class Listener : public Watch {
 public:
  bool should_abort(int) override { return false; }
  void record_abort(int) override {}
  void sleeps(int peer) override { sleeper = peer; }
  void waited(int peer, Clock::time_point began, Clock::duration span) override {
    EXPECT_EQ(peer, 3);
    ++ends, since = began, slept = span;
  }
  int sleeper = -1, ends = 0;
  Clock::time_point since{};
  Clock::duration slept{};
};

TEST(Flag, AWatchLearnsOfSleepsAndOfTracedWaits) {
  Flag flag{};
  Listener listener;
  WaitRules rules = within(milliseconds(1), &listener);
  EXPECT_EQ(wait(flag, Stamp(0), 3, rules), Waited::kReached);
  EXPECT_EQ(listener.ends, 0) << "it was over at once";
  EXPECT_EQ(wait(flag, Stamp(1), 3, rules), Waited::kTimedOut);
  EXPECT_EQ(listener.sleeper, 3);
  EXPECT_EQ(listener.ends, 1);
  EXPECT_EQ(listener.since, Clock::time_point()) << "not traced";
  EXPECT_GT(listener.slept, Clock::duration(0));
  rules.traced = true;
  const auto before = Clock::now();
  EXPECT_EQ(wait(flag, Stamp(1), 3, rules), Waited::kTimedOut);
  EXPECT_GE(listener.since, before);
  SpinBudget budget(milliseconds(2000));
  rules = within(milliseconds(20'000), &listener), rules.spin = &budget, rules.traced = true;
  int looks = 0;
  EXPECT_EQ(wait(
                flag, [&] { return ++looks > 100; }, 3, rules),
            Waited::kReached);
  EXPECT_EQ(listener.ends, 3) << "a traced wait that only spun";
  EXPECT_EQ(listener.slept, Clock::duration(0));
}

TEST(Flag, AnAlarmEndsAWaitAndTheCauseIsKept) {
  Flag flag{};
  Alarm alarm;
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(30));
    alarm.on = true;
    ring(flag);
  });
  EXPECT_EQ(wait(flag, Stamp(1), 7, within(milliseconds(20'000), &alarm)), Waited::kAlarmed);
  EXPECT_EQ(alarm.recorded, 7);
  later.join();
}

/// A watch that reports the peer as gone just when its last signal has arrived.
class LastReport : public Alarm {
 public:
  explicit LastReport(Flag& flag) : flag_(flag) {}
  bool should_abort(int) override {
    signal(flag_, 1);
    return true;
  }

 private:
  Flag& flag_;
};

TEST(Flag, TheLastSignalOfAPeerThatHasEndedCounts) {
  Flag flag{};
  LastReport watch(flag);
  EXPECT_EQ(wait(flag, Stamp(1), 0, within(milliseconds(20'000), &watch)), Waited::kReached);
  EXPECT_EQ(watch.recorded, -1) << "nothing has failed";
}

/// Answers each signal of the other thread with one of its own.
void volley(Flag& mine, Flag& theirs, int rounds, bool begins) {
  SpinBudget budget(milliseconds(20));
  YieldPolicy yields;
  WaitRules rules = within(milliseconds(20'000));
  rules.spin = &budget;
  rules.yields = &yields;
  for (int i = 1; i <= rounds; ++i) {
    if (begins) signal(mine, Stamp(i));
    EXPECT_EQ(wait(theirs, Stamp(i), 0, rules), Waited::kReached);
    if (!begins) signal(mine, Stamp(i));
  }
}

/// Pins this thread, and the threads that it starts meanwhile, to one core.
class OnOneCore {
 public:
  OnOneCore() {
    EXPECT_EQ(sched_getaffinity(0, sizeof all_, &all_), 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(size_t(sched_getcpu()), &one);
    EXPECT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  }
  ~OnOneCore() { EXPECT_EQ(sched_setaffinity(0, sizeof all_, &all_), 0); }

 private:
  cpu_set_t all_;
};

/// The CPU time per round of a volley between two threads on one core.
double seconds_a_round() {
  constexpr int kRounds = 20;
  Flag a{}, b{};
  const std::clock_t began = std::clock();  // CPU time, so other processes do not count
  std::thread other([&] { volley(b, a, kRounds, /*begins=*/false); });
  volley(a, b, kRounds, /*begins=*/true);
  other.join();
  return double(std::clock() - began) / CLOCKS_PER_SEC / kRounds;
}

TEST(Flag, TwoThreadsOnOneCoreYieldInsteadOfSpinning) {
  const OnOneCore here;
  // Without yielding, each thread spins for at least 5 ms. Beside another process on the core, yields take long and are
  // rightly skipped for a while. So one undisturbed volley is proof, and each starts with its own YieldPolicy.
  const auto until = Clock::now() + std::chrono::seconds(20);
  double least = seconds_a_round();
  while (least > 0.0005 && Clock::now() < until) least = std::min(least, seconds_a_round());
  EXPECT_LE(least, 0.0005) << "each has spun on the core that the other one needs";
}

TEST(YieldPolicy, LongYieldMakesTheNextWaitsSleep) {
  const OnOneCore here;
  YieldPolicy yields;
  EXPECT_TRUE(yields.should_yield());
  std::atomic<bool> enough{false};
  std::thread computes([&] {
    while (!enough) relax();
  });
  const auto until = Clock::now() + std::chrono::seconds(20);
  do yields.yield_core();
  while (yields.should_yield() && Clock::now() < until);
  enough = true;
  computes.join();
  EXPECT_LT(Clock::now(), until) << "never away for long beside one that computes";
  for (int i = 0; i < 62; ++i) EXPECT_FALSE(yields.should_yield()) << i;
  for (int i = 0; i < 4096; ++i) (void)yields.should_yield();
  EXPECT_TRUE(yields.should_yield()) << "tried again later";
}

TEST(SpinBudget, GrowsWhenItPaysAndShrinksWhenNot) {
  SpinBudget budget(std::chrono::microseconds(200));
  for (int i = 0; i < 20; ++i) budget.miss();
  const auto least = budget.span();
  EXPECT_EQ(least, std::chrono::microseconds(50)) << "less than a sleep costs, and two ranks sleep in turn for ever";
  budget.hit();
  EXPECT_EQ(budget.span(), 2 * least);
  for (int i = 0; i < 20; ++i) budget.hit();
  EXPECT_EQ(budget.span(), std::chrono::microseconds(200));
}

TEST(Deadline, NothingOrTooMuchIsForever) {
  EXPECT_FALSE(Deadline::after(milliseconds(0)).passed(Clock::now() + std::chrono::hours(100'000)));
  EXPECT_FALSE(Deadline::after(milliseconds::max()).passed(Clock::now() + std::chrono::hours(100'000)));
  EXPECT_TRUE(Deadline::after(milliseconds(5)).passed(Clock::now() + milliseconds(6)));
}

}  // namespace
}  // namespace nvx::test
