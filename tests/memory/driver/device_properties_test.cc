// The driver's report of device memory that network cards can access.

#include "memory/driver/driver_library.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "support/fake_driver.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

Deadline in_time() { return Deadline::after(std::chrono::seconds(20)); }

TEST(DeviceProperties, AreQueriedOfEachDevice) {
  const auto found = device_properties(std::make_shared<FakeDriver>(3), in_time());
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[1].bus, "0000:02:00.0");
  EXPECT_TRUE(found[0].exports_dma_buf);
  EXPECT_FALSE(found[1].exports_dma_buf);
}

TEST(DeviceProperties, WhicheverCallIsRefusedIsNamed) {
  for (int n = 0; n < 3; ++n) {
    const auto driver = std::make_shared<FakeDriver>(2);
    driver->fail_call(n);
    try {
      (void)device_properties(driver, in_time());
      ADD_FAILURE() << n;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(n == 0 ? "cuDeviceGetCount" : "cuDeviceGetAttribute"),
                std::string::npos);
    }
  }
}

TEST(DeviceProperties, ADriverThatDoesNotAnswerIsLeftToItself) {
  const auto driver = std::make_shared<FakeDriver>(2);
  driver->block("describe");
  EXPECT_THROW((void)device_properties(driver, Deadline::after(std::chrono::milliseconds(100))), Error);
  driver->unblock();
}

}  // namespace
}  // namespace nvx::test
