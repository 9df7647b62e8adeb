#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// Whether the driver can export a device's memory as a dma-buf, through which network cards could access it.
struct DmaBuf {
  std::string bus;
  std::string name;
  bool exports = false;
};

/// Queries all devices that the process can see. Throws Error if the driver refuses or does not answer in time.
std::vector<DmaBuf> dma_bufs(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline);

}  // namespace nvx
