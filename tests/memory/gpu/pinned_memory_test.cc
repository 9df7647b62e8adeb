// Pinned memory of a process: it is used again, and never while a device may still use it.

#include "memory/gpu/pinned_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "memory/gpu/device_memory.h"
#include "support/fake_driver.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

class PinnedMemoryTest : public testing::Test {
 protected:
  int pins() const { return driver_->calls_of("pin"); }

  const std::shared_ptr<FakeDriver> driver_ = std::make_shared<FakeDriver>(2);
  std::shared_ptr<PinnedMemory> pinned_ = std::make_shared<PinnedMemory>(driver_);
};

TEST_F(PinnedMemoryTest, IsZeroEachTime) {
  for (int turn = 0; turn < 2; ++turn) {
    const auto region = pinned_->get(0, 100'000);
    ASSERT_GE(region->bytes(), 100'000u);
    EXPECT_TRUE(std::all_of(region->host(), region->host() + 100'000, [](std::byte b) { return b == std::byte(0); }));
    std::fill_n(region->host(), region->bytes(), std::byte(0xff));
  }
  EXPECT_EQ(pins(), 1);
}

TEST_F(PinnedMemoryTest, EachDeviceHasItsOwn) {
  (void)pinned_->get(0, 1);
  (void)pinned_->get(1, 1);
  EXPECT_EQ(pins(), 2);
  (void)pinned_->get(0, 1);
  (void)pinned_->get(1, 1);
  EXPECT_EQ(pins(), 2);
}

/// Otherwise groups that hold small pieces would use up the large ones.
TEST_F(PinnedMemoryTest, ASmallPieceTakesNoLargeOne) {
  (void)pinned_->get(0, 17 * M);
  const auto small = pinned_->get(0, 1);
  EXPECT_LE(small->bytes(), 65536u);
  EXPECT_GE(pinned_->get(0, 12 * M)->bytes(), 17 * M);
  EXPECT_EQ(pins(), 2);
}

TEST_F(PinnedMemoryTest, AnySizesPinABoundedAmount) {
  size_t most = 0;
  for (size_t bytes = 1; bytes <= 16 * M; bytes += bytes / 16 + 1) {
    const auto region = pinned_->get(0, bytes);
    ASSERT_GE(region->bytes(), bytes);
    most = std::max(most, region->bytes());
  }
  EXPECT_LE(most, 16 * M);
  EXPECT_LE(pins(), 4 * 8 + 1) << "four sizes between two powers of two";
}

/// The fake driver aborts if memory is unpinned that its devices may still write.
TEST_F(PinnedMemoryTest, WhatAHangingDeviceMayUseIsNotUsedAgain) {
  const auto* kept = pinned_->get(0, 1)->host();
  {
    const auto region = pinned_->get(0, 1);
    EXPECT_EQ(region->host(), kept);
    region->abandon();
  }
  EXPECT_NE(pinned_->get(0, 1)->host(), kept);
  EXPECT_EQ(pins(), 2);
  pinned_.reset();
  EXPECT_EQ(driver_->unreleased(), "1 pinned ranges ");
}

TEST_F(PinnedMemoryTest, ADriverThatRefusesIsAskedAgain) {
  driver_->refuse("pin", 712);
  EXPECT_THROW((void)pinned_->get(0, 1), Error);
  driver_->refuse("pin", 0);
  EXPECT_TRUE(pinned_->get(0, 1));
}

}  // namespace
}  // namespace nvx::test
