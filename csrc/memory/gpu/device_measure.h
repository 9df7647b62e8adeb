#pragma once

#include <memory>
#include <string>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// The speed at which one device writes to another one's memory.
struct PairSpeed {
  double gb_s = 0;      ///< of large copies
  double us = 0;        ///< until a small copy is known to be complete, including the calls
  double own_us = 0;    ///< the same within the writing device: the part that is not the path between the two
  std::string why_not;  ///< not measured, for this reason
};

/// Measures two devices of this process, until soon after the deadline. Frees its memory unless a copy may still access
/// it; peer access and contexts stay. `large`: the size of a copy that saturates any link.
PairSpeed measure_pair(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline,
                       size_t large = size_t(64) << 20);

}  // namespace nvx
