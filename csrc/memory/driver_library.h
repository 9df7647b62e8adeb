#pragma once

#include <memory>

#include "memory/device_driver.h"

namespace nvx {

/// libcuda, loaded when first asked for and never unloaded. Throws Error where there is none, or one that is too old.
/// path: instead of the system's; for tests.
std::shared_ptr<DeviceDriver> driver_library(const char* path = nullptr);

}  // namespace nvx
