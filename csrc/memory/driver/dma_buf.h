#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// Whether network cards could read and write a device's memory, given a file descriptor of it: what its driver says.
struct DmaBuf {
  std::string bus;
  std::string name;
  bool exports = false;
};

/// Of all devices that the driver shows this process. Throws Error where it refuses, or does not answer in time.
std::vector<DmaBuf> dma_bufs(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline);

}  // namespace nvx
