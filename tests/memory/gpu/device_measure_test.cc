// The measurement of two GPUs, over a fake driver.

#include "memory/gpu/device_measure.h"

#include <gtest/gtest.h>

#include "support/fake_driver.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using PeerAccess = FakeDriver::PeerAccess;

TEST(DeviceMeasure, ReportsSpeedAndLatencyAndReleasesEverything) {
  const auto driver = std::make_shared<FakeDriver>(2);
  const PairSpeed speed = measure_pair(driver, 0, 1, Deadline::after(milliseconds(60'000)));
  EXPECT_EQ(speed.why_not, "");
  EXPECT_GT(speed.gb_s, 0);
  EXPECT_GT(speed.us, 0);
  EXPECT_GT(speed.own_us, 0);
  EXPECT_EQ(driver->unreleased(), "");
}

/// A slow path between the two does not affect a copy within the writing GPU.
TEST(DeviceMeasure, SeparatesTheCopyFromTheCall) {
  const auto driver = std::make_shared<FakeDriver>(2);
  driver->pair(0, 1, PeerAccess::kSlow);
  const PairSpeed speed = measure_pair(driver, 0, 1, Deadline::after(milliseconds(60'000)), size_t(1) << 20);
  EXPECT_GE(speed.us, 3000);
  EXPECT_LT(speed.own_us, speed.us / 2);
}

TEST(DeviceMeasure, FailedMeasurementHasAReason) {
  const std::pair<PeerAccess, const char*> kAccesses[] = {
      {PeerAccess::kRefuses, "the driver reports that GPU 0 cannot access GPU 1"},
      {PeerAccess::kHangs, "a copy did not end within 200 ms"},
      {PeerAccess::kBlocks, "a driver call did not return within 200 ms"},
  };
  for (const auto& [access, why] : kAccesses) {
    const auto driver = std::make_shared<FakeDriver>(2);
    driver->pair(0, 1, access);
    const auto began = Clock::now();
    EXPECT_EQ(measure_pair(driver, 0, 1, Deadline::after(milliseconds(200))).why_not, why);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
    driver->unblock();
    EXPECT_TRUE(eventually(milliseconds(20'000), [&, access = access] {
      return access == PeerAccess::kHangs || driver->unreleased().empty();
    })) << driver->unreleased();
  }
}

/// All memory is returned, except after a copy that is not known to have ended.
TEST(DeviceMeasure, WhicheverCallFailsEverythingIsReturned) {
  int kept = 0;
  for (int n = 0; n < 12; n += int(as_fast(1, 2))) {
    const auto driver = std::make_shared<FakeDriver>(2);
    driver->fail_call(n);
    const PairSpeed speed = measure_pair(driver, 0, 1, Deadline::after(milliseconds(60'000)));
    EXPECT_NE(speed.why_not.find("fake refusal 999"), std::string::npos) << n;
    const bool begun = driver->faulted_call() == "drained";
    EXPECT_EQ(driver->unreleased(), begun ? "2 allocations 1 streams " : "") << n;
    kept += begun;
  }
  EXPECT_GT(kept, 0);
}

TEST(DeviceMeasure, WhicheverCallHangsItReturns) {
  for (const char* call :
       {"can_reach", "allocate", "enable_peer", "create_stream", "copy", "drained", "destroy_stream", "free"}) {
    const auto driver = std::make_shared<FakeDriver>(2);
    driver->block(call);
    const PairSpeed speed = measure_pair(driver, 0, 1, Deadline::after(milliseconds(100)));
    EXPECT_EQ(speed.why_not, "a driver call did not return within 100 ms") << call;
    driver->unblock();
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return driver->unreleased().empty(); })) << call;
  }
}

}  // namespace
}  // namespace nvx::test
