#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// libcuda, loaded at the first call and never unloaded. Throws Error if there is no driver, if it is too old, or if it
/// does not initialise in time. `path` replaces the system's library, for tests.
std::shared_ptr<DeviceDriver> driver_library(const char* path = nullptr,
                                             std::chrono::milliseconds timeout = std::chrono::minutes(1));

/// Queries all devices that the process can see. Throws Error if the driver refuses or does not answer in time.
std::vector<DeviceProperties> device_properties(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline);

}  // namespace nvx
