#pragma once

#include <chrono>
#include <memory>

#include "memory/driver/device_driver.h"

namespace nvx {

/// libcuda, loaded when first asked for and never unloaded. Throws Error where there is none, one that is too old, or
/// one that does not begin to work in time. path: instead of the system's; for tests.
std::shared_ptr<DeviceDriver> driver_library(const char* path = nullptr,
                                             std::chrono::milliseconds patience = std::chrono::minutes(1));

}  // namespace nvx
