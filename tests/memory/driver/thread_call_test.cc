// Calls on threads of their own, with waits in slices.

#include "memory/driver/thread_call.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

TEST(ThreadCall, IsWaitedForInSlices) {
  std::atomic<bool> may_end{false};
  ThreadCall<int> call([&] {
    while (!may_end) std::this_thread::sleep_for(milliseconds(1));
    return 7;
  });
  EXPECT_FALSE(call.get(Clock::now()));
  EXPECT_FALSE(call.get(Clock::now() + milliseconds(5)));
  may_end = true;
  const auto result = call.get(Clock::now() + std::chrono::seconds(60));
  ASSERT_TRUE(result);
  EXPECT_EQ(*result, 7);
}

TEST(ThreadCall, ThrowsWhatItsWorkHasThrown) {
  ThreadCall<int> call([]() -> int { throw std::runtime_error("broken"); });
  EXPECT_THROW((void)call.get(Clock::now() + std::chrono::seconds(60)), std::runtime_error);
}

TEST(ThreadCall, CapturesAreDestroyedBeforeTheResultIsReady) {
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = held;
  ThreadCall<int> call([held = std::move(held)] { return *held; });
  ASSERT_TRUE(call.get(Clock::now() + std::chrono::seconds(60)));
  EXPECT_TRUE(seen.expired());
}

}  // namespace
}  // namespace nvx::test
