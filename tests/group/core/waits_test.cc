// How long the waits of a group spin.

#include "group/core/waits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

namespace nvx::test {
namespace {

class Nothing final : public Watch {
  bool should_abort(int /*peer*/) override { return false; }
  void record_abort(int /*peer*/) override {}
};

constexpr int kNoSpin = 7;

/// Ends this process with the microseconds that two ranks on so many cores spin.
[[noreturn]] void end_with_spin(size_t cores) {
  PlanFacts facts;
  facts.ranks = 2;
  facts.cores = cores;
  Nothing nothing;
  Waits waits(facts, std::chrono::seconds(1), nothing);
  const WaitRules rules = waits.rules({}, Runner::kCaller);
  _exit(rules.spin ? int(std::chrono::duration_cast<std::chrono::microseconds>(rules.spin->span()).count()) : kNoSpin);
}

/// In a process of its own each, because a process reads the variable once.
TEST(Waits, SpinForAsLongAsTheVariableSays) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  unsetenv("NVX_SPIN_US");
  EXPECT_EXIT(end_with_spin(2), testing::ExitedWithCode(200), "");
  EXPECT_EXIT(end_with_spin(1), testing::ExitedWithCode(kNoSpin), "");
  setenv("NVX_SPIN_US", "50", 1);
  EXPECT_EXIT(end_with_spin(1), testing::ExitedWithCode(50), "");
  setenv("NVX_SPIN_US", "0", 1);
  EXPECT_EXIT(end_with_spin(2), testing::ExitedWithCode(kNoSpin), "");
  unsetenv("NVX_SPIN_US");
}

/// Devices count a timeout in nanoseconds, of which 63 bits last for 292 years.
TEST(Waits, HaveNoSpanThatOverflows) {
  Nothing nothing;
  Waits waits(PlanFacts(), std::chrono::hours(24 * 200'000), nothing);
  EXPECT_EQ(waits.span_of(std::chrono::milliseconds(0)), Deadline::kForever);
  EXPECT_EQ(waits.span_of(std::chrono::milliseconds::max()), Deadline::kForever);
  EXPECT_EQ(waits.span_of(std::chrono::seconds(3)), std::chrono::seconds(3));
}

}  // namespace
}  // namespace nvx::test
