#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// What one device reaches when it writes to another one's memory.
struct PairSpeed {
  double gb_s = 0;      ///< of large copies
  double us = 0;        ///< until a small one is known to be done, the calls included
  double own_us = 0;    ///< the same within the writing device: what of it is not the way between the two
  std::string why_not;  ///< not measured, for this reason
};

/// Both devices are this process's. Returns at the deadline or soon after it. The memory that it used is given back,
/// unless a copy that is not known to have ended may still touch it. Peer access and the devices' contexts stay. large:
/// the bytes of a copy that shows the bandwidth; enough for any link.
PairSpeed measure_pair(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline,
                       size_t large = size_t(64) << 20);

}  // namespace nvx
