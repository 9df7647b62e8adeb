#include "group/device/device_wait.h"

#include <gtest/gtest.h>

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// Records the calls that `wait_on_device` makes to a group.
struct AskedGroup {
  AskedGroup& device() { return *this; }
  Status check_kernels() { return on_device; }
  Status check_alive() { return alive; }
  bool failed() const { return !first.ok(); }
  Status failure() const { return first; }
  bool check_interrupt() {
    if (++interrupts == 3 && interrupted) alive = {Code::kInterrupted, "nvx: interrupted by the user"};
    return interrupted;
  }

  Status on_device, alive, first;
  int interrupts = 0;
  bool interrupted = false;
};

TEST(DeviceWait, IsOkWhenItIsReady) {
  AskedGroup group;
  int looks = 0;
  const auto end = wait_on_device(
      group, [&] { return ++looks == 300; }, Deadline());
  ASSERT_TRUE(end);
  EXPECT_TRUE(end->ok());
  EXPECT_EQ(looks, 300);
}

TEST(DeviceWait, IsOkWhereItIsReadyInAGroupThatHasFailed) {
  AskedGroup group;
  group.on_device = {Code::kTimeout, "nvx: a kernel gave up"};
  const auto end = wait_on_device(
      group, [] { return true; }, Deadline());
  EXPECT_TRUE(end && end->ok());
}

TEST(DeviceWait, EndsWithTheResultOfTheDeviceOrOfTheGroup) {
  AskedGroup group;
  group.on_device = {Code::kTimeout, "nvx: a kernel gave up"};
  EXPECT_EQ(wait_on_device(
                group, [] { return false; }, Deadline())
                ->what(),
            "nvx: a kernel gave up");
  group.on_device = {};
  group.alive = {Code::kInvalid, "nvx: it has been destroyed"};
  EXPECT_EQ(wait_on_device(
                group, [] { return false; }, Deadline())
                ->what(),
            "nvx: it has been destroyed");
}

/// check_alive() says that a call was not begun. The operation that waits here was.
TEST(DeviceWait, EndsWithTheFirstFailureOfTheGroup) {
  AskedGroup group;
  group.alive = {Code::kTimeout, "nvx: the group failed earlier, so this call was not begun"};
  group.first = {Code::kTimeout, "nvx: rank 1 is missing"};
  EXPECT_EQ(wait_on_device(
                group, [] { return false; }, Deadline())
                ->what(),
            "nvx: rank 1 is missing");
}

TEST(DeviceWait, EndsAtTheDeadline) {
  AskedGroup group;
  const Deadline deadline = Deadline::after(milliseconds(20));
  EXPECT_FALSE(wait_on_device(
      group, [] { return false; }, deadline));
  EXPECT_TRUE(deadline.passed(Clock::now()));
}

TEST(DeviceWait, EndsWhenTheUserInterrupts) {
  AskedGroup group;
  group.interrupted = true;
  const auto end = wait_on_device(
      group, [] { return false; }, Deadline());
  ASSERT_TRUE(end);
  EXPECT_EQ(end->code(), Code::kInterrupted);
}

}  // namespace
}  // namespace nvx::test
