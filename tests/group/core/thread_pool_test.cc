// The order of a lane and the threads of the pool.

#include "group/core/thread_pool.h"

#include <gtest/gtest.h>

#include <chrono>

#include "support/ranks.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

class Note : public Task {
 public:
  Note(std::function<void(Runner)> act, std::function<void()> end = nullptr)
      : act_(std::move(act)), end_(std::move(end)) {}
  void perform(Runner runner) override { act_(runner); }
  void conclude() override {
    if (end_) end_();
  }

 private:
  std::function<void(Runner)> act_;
  std::function<void()> end_;
};

std::shared_ptr<Note> note(std::function<void(Runner)> act) { return std::make_shared<Note>(std::move(act)); }

TEST(Lane, TasksRunOnceAndInOrder) {
  const auto lane = std::make_shared<Lane>();
  std::vector<int> order;  // the lane runs one task at a time, so no lock is needed
  std::vector<std::shared_ptr<Note>> tasks;
  for (int i = 0; i < 200; ++i) {
    tasks.push_back(note([&order, i](Runner) { order.push_back(i); }));
    lane->submit(tasks.back());
  }
  for (const auto& task : tasks) EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kYes, nullptr));
  ASSERT_EQ(order.size(), 200u);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(order[size_t(i)], i);
}

TEST(Lane, RunsWithoutAWaiter) {
  const auto lane = std::make_shared<Lane>();
  const auto task = note([](Runner runner) { EXPECT_EQ(runner, Runner::kPool); });
  lane->submit(task);
  EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
}

TEST(Lane, InlineHolderExcludesQueuedTasks) {
  const auto lane = std::make_shared<Lane>();
  ASSERT_TRUE(lane->begin_inline());
  EXPECT_FALSE(lane->begin_inline());
  std::atomic<bool> ran{false};
  const auto task = note([&](Runner) { ran = true; });
  lane->submit(task);
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(ran);
  EXPECT_FALSE(lane->begin_inline());
  lane->end_inline();
  EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kYes, nullptr));
  EXPECT_TRUE(ran);
  lane->settle(milliseconds(5000));
  EXPECT_TRUE(lane->begin_inline());
  lane->end_inline();
}

TEST(Lane, RecordsTheThreadThatHoldsIt) {
  const auto lane = std::make_shared<Lane>();
  EXPECT_FALSE(lane->held_here());
  ASSERT_TRUE(lane->begin_inline());
  EXPECT_TRUE(lane->held_here());
  std::thread([&] { EXPECT_FALSE(lane->held_here()); }).join();
  const auto began = std::chrono::steady_clock::now();
  lane->settle(std::chrono::seconds(10), Lane::Until::kIdle);  // neither waits for this thread's own task
  lane->settle(std::chrono::seconds(10));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  lane->end_inline();
  EXPECT_FALSE(lane->held_here());
  bool during = false, after = true;
  const auto task =
      std::make_shared<Note>([&](Runner) { during = lane->held_here(); }, [&] { after = lane->held_here(); });
  lane->submit(task);
  EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kYes, nullptr));
  EXPECT_TRUE(during);
  EXPECT_FALSE(after);
}

TEST(Lane, AWaitThatGivesUpComesBack) {
  const auto lane = std::make_shared<Lane>();
  std::atomic<bool> go_on{false};
  const auto stuck = note([&](Runner) { EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return go_on.load(); })); });
  const auto behind = note([](Runner) {});
  lane->submit(stuck);
  lane->submit(behind);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(lane->wait(*behind, Lane::MayRun::kNo, [] { return true; }));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(2));
  go_on = true;
  EXPECT_TRUE(lane->wait(*behind, Lane::MayRun::kYes, nullptr));
}

/// The waiter wakes while the task's `conclude()` runs. The next task may need what the waiter does afterwards.
TEST(Lane, AWaiterDoesNotRunTheNextTask) {
  const auto lane = std::make_shared<Lane>();
  const auto waiter = std::this_thread::get_id();
  std::atomic<bool> began{false}, waited{false}, by_waiter{false};
  const auto first = std::make_shared<Note>(
      [&](Runner) {
        began = true;
        std::this_thread::sleep_for(milliseconds(100));
      },
      [] { std::this_thread::sleep_for(milliseconds(200)); });
  const auto next = note([&](Runner) {
    by_waiter = std::this_thread::get_id() == waiter;
    EXPECT_TRUE(eventually(milliseconds(by_waiter ? 0 : 10'000), [&] { return waited.load(); }));
  });
  lane->submit(first);
  lane->submit(next);
  EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return began.load(); }));
  EXPECT_TRUE(lane->wait(*first, Lane::MayRun::kYes, nullptr));
  waited = true;
  EXPECT_TRUE(lane->wait(*next, Lane::MayRun::kNo, nullptr));
  EXPECT_FALSE(by_waiter);
}

TEST(Lane, MayGoWhileATaskIsQueued) {
  auto lane = std::make_shared<Lane>();
  const auto task = note([](Runner) {});
  lane->submit(task);
  lane.reset();  // the pool's thread holds the lane until it is drained
  EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
}

/// A task of one lane may wait for a task of any other lane: no two lanes share a thread.
TEST(ThreadPool, NoLaneWaitsForAnotherOnesThread) {
  constexpr int kLanes = 16;
  std::vector<std::shared_ptr<Lane>> lanes;
  std::atomic<int> arrived{0};
  std::vector<std::shared_ptr<Note>> tasks;
  for (int i = 0; i < kLanes; ++i) {
    lanes.push_back(std::make_shared<Lane>());
    tasks.push_back(note([&](Runner) {
      ++arrived;
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return arrived == kLanes; }));
    }));
    lanes.back()->submit(tasks.back());
  }
  for (const auto& task : tasks) EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return task->done(); }));
  EXPECT_GE(ThreadPool::instance().threads(), size_t(1));
}

TEST(ThreadPool, ManyThreadsSubmitAndWait) {
  const auto lane = std::make_shared<Lane>();
  int count = 0;  // guarded by the lane
  as_threads(4, [&](int) {
    for (int i = 0; i < 300; ++i) {
      if (i % 3 == 0 && lane->begin_inline()) {
        ++count;
        lane->end_inline();
        continue;
      }
      const auto task = note([&](Runner) { ++count; });
      lane->submit(task);
      EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kYes, nullptr));
    }
  });
  EXPECT_EQ(count, 4 * 300);
}

TEST(ThreadPool, AForkedChildHasOneOfItsOwn) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const auto warm = std::make_shared<Lane>();
  const auto task = note([](Runner) {});
  warm->submit(task);
  ASSERT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
  all_end_well(1, [](int) {
    EXPECT_EQ(ThreadPool::instance().threads(), 0u);
    const auto lane = std::make_shared<Lane>();
    const auto mine = note([](Runner) {});
    lane->submit(mine);
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return mine->done(); }));
  });
}

TEST(Lane, ExceptionOfATaskLeavesTheLaneUsable) {
  const auto lane = std::make_shared<Lane>();
  for (const bool waits : {true, false}) {
    const auto performs = note([](Runner) { throw std::runtime_error("of an operation"); });
    const auto concludes = std::make_shared<Note>([](Runner) {}, [] { throw 7; });
    for (const auto& task : {performs, concludes}) {
      lane->submit(task);
      if (waits) {
        EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kYes, nullptr));
      }
      EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
    }
  }
}

/// A process that cannot create another thread.
class NoThreads : public testing::Test {
 protected:
  NoThreads() { ThreadPool::instance().limit(0); }
  ~NoThreads() override { ThreadPool::instance().limit(SIZE_MAX); }
};

TEST_F(NoThreads, SubmitterRunsTheTask) {
  EXPECT_FALSE(ThreadPool::instance().start([] {}));
  const auto lane = std::make_shared<Lane>();
  for (int i = 0; i < 3; ++i) {
    const auto task = note([](Runner) {});
    lane->submit(task);
    EXPECT_TRUE(task->done());
  }
}

TEST_F(NoThreads, HolderRunsTasksQueuedMeanwhile) {
  const auto lane = std::make_shared<Lane>();
  ASSERT_TRUE(lane->begin_inline());
  const auto task = note([](Runner) {});
  lane->submit(task);
  EXPECT_FALSE(task->done());
  lane->end_inline();
  EXPECT_TRUE(task->done());
}

TEST_F(NoThreads, AWaiterRunsTheTaskEvenIfItNeedNot) {
  const auto lane = std::make_shared<Lane>();
  ASSERT_TRUE(lane->begin_inline());
  const auto task = note([](Runner) {});
  std::atomic<bool> waits{false};
  std::thread waiter([&] { EXPECT_TRUE(lane->wait(*task, Lane::MayRun::kNo, [&] { return waits = true, false; })); });
  EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return waits.load(); }));
  lane->submit(task);
  lane->end_inline();
  waiter.join();
}

TEST_F(NoThreads, ComeBackWhenTheSystemHasSomeAgain) {
  const auto lane = std::make_shared<Lane>();
  lane->submit(note([](Runner) {}));
  ThreadPool::instance().limit(SIZE_MAX);
  const auto task = note([](Runner runner) { EXPECT_EQ(runner, Runner::kPool); });
  lane->submit(task);
  EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
  EXPECT_GE(ThreadPool::instance().threads(), size_t(1));
}

/// In a process of its own, because that has no pool afterwards.
TEST(ThreadPoolStop, EndsTheIdleThreadsAndRunsWhatComesLater) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  all_end_well(1, [](int) {
    const auto lane = std::make_shared<Lane>();
    const auto task = note([](Runner) {});
    lane->submit(task);
    ASSERT_TRUE(eventually(milliseconds(10'000), [&] { return task->done(); }));
    ThreadPool::instance().stop(std::chrono::seconds(10));
    EXPECT_EQ(ThreadPool::instance().threads(), 0u);
    const auto late = note([](Runner) {});
    lane->submit(late);
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return late->done(); }));
  });
}

}  // namespace
}  // namespace nvx::test
