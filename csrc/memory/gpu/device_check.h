#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "memory/gpu/device_work.h"

namespace nvx {

constexpr size_t kCheckBytes = 64 << 10;

/// A transfer that a device has to prove. An address of 0 skips that half.
struct PairCheck {
  int device = 0;
  DevicePtr from = 0;                                     ///< the device reads here ...
  uint64_t expect = 0;                                    ///< ... and expects the pattern of this seed
  DevicePtr to = 0;                                       ///< then it writes here ...
  uint64_t leave = 0;                                     ///< ... the pattern of this seed
  std::vector<std::shared_ptr<DeviceRegion>> holds = {};  ///< the regions of these addresses, kept alive by the check
};

/// Checks a pair by moving data, whatever the driver reports. Returns at the deadline or soon after it. A driver call
/// that does not return keeps its own thread. Memory that an unfinished copy may still access is kept.
PairVerdict run_check(const std::shared_ptr<DeviceDriver>& driver, const PairCheck& check, const Deadline& deadline);

}  // namespace nvx
