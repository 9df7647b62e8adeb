#pragma once

#include <memory>
#include <vector>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// Queries all devices that the process can see. Throws Error if the driver refuses or does not answer in time.
std::vector<DeviceFacts> device_facts(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline);

}  // namespace nvx
