#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "memory/gpu/device_work.h"

namespace nvx {

/// How much of it moves in a check.
constexpr size_t kCheckBytes = 64 << 10;

/// What a device is asked to show. An address of 0: not that half.
struct PairCheck {
  int device = 0;
  DevicePtr from = 0;                                     ///< it reads here ...
  uint64_t expect = 0;                                    ///< ... and finds the pattern of this seed
  DevicePtr to = 0;                                       ///< then it writes here ...
  uint64_t leave = 0;                                     ///< ... the pattern of this seed
  std::vector<std::shared_ptr<DeviceRegion>> holds = {};  ///< whose addresses these are: they outlive the check
};

/// Moves data instead of believing what a driver says. Returns at the deadline or soon after it, whatever the driver
/// does: a call that does not return keeps a thread of its own, and what a copy may still touch that is not known to
/// have ended stays as it is.
PairVerdict run_check(const std::shared_ptr<DeviceDriver>& driver, const PairCheck& check, const Deadline& deadline);

}  // namespace nvx
