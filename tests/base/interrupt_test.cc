// How often the host language is queried for a stop request of the user.

#include "base/interrupt.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace nvx::test {
namespace {

std::atomic<int> checks{0};

class Interrupt : public testing::Test {
 protected:
  Interrupt() {
    checks = 0;
    interrupt_check = [] { return ++checks > 0; };
  }
  ~Interrupt() override { interrupt_check = nullptr; }
};

TEST_F(Interrupt, IsCheckedAtMostTenTimesASecond) {
  const auto began = std::chrono::steady_clock::now();
  int stops = 0;
  while (stops < 4) stops += stop_requested();
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(300));
  EXPECT_EQ(checks, 4);
}

TEST_F(Interrupt, IsCheckedOnTheMainThreadOnly) {
  std::thread([] {
    for (int i = 0; i < 1000; ++i) EXPECT_FALSE(stop_requested());
  }).join();
  EXPECT_EQ(checks, 0);
}

TEST_F(Interrupt, StaysPendingForADestructor) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
  {
    const Uninterrupted here;
    while (std::chrono::steady_clock::now() < end) EXPECT_FALSE(stop_requested());
  }
  EXPECT_EQ(checks, 0);
  EXPECT_TRUE(stop_requested());
}

TEST(InterruptUnset, NothingIsChecked) { EXPECT_FALSE(stop_requested()); }

}  // namespace
}  // namespace nvx::test
