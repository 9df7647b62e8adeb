#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"
#include "memory/gpu/device_memory.h"

namespace nvx {

enum class PairState : uint8_t {
  kFine,
  kRefused,
  kHung,  ///< was begun, and is not known to have ended: it may go on
  kCorrupt,
};

struct PairVerdict {
  PairState state = PairState::kFine;
  std::string why;
  bool fine() const { return state == PairState::kFine; }
};

/// Work that a device is given to do, in order. Work that was begun and is not known to have ended may go on for as
/// long as the process lives. The queue, and all the memory that the work touches, then stay as long too, even if
/// everybody lets go of them.
class DeviceWork {
 public:
  /// touches: the memory that the work reads and writes. Throws Error.
  DeviceWork(std::shared_ptr<DeviceDriver> driver, int device, std::vector<std::shared_ptr<DeviceRegion>> touches);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  /// These begin work. They throw Error where the driver refuses; that work was then not begun.
  void copy(DevicePtr to, DevicePtr from, size_t bytes);
  void fill(DevicePtr to, uint8_t value, size_t bytes);
  /// The queue, for somebody who begins something else on it, or tries to: drain() waits for that too.
  DeviceQueue lend() {
    settled_ = false;
    return queue_;
  }
  /// Waits for all that was begun, and looks again after each pause. False when it did not end in time. Throws Error
  /// where the driver does not tell.
  bool drain(const Deadline& deadline, std::chrono::microseconds pause = std::chrono::microseconds(20));
  /// Runs steps and returns what they find. Where the driver refuses one of them, the answer is kHung if others may
  /// still be going on; else the refusal is thrown on.
  PairVerdict carry_out(const std::function<PairVerdict()>& steps);

 private:
  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const std::vector<std::shared_ptr<DeviceRegion>> touches_;
  DeviceQueue queue_ = 0;
  bool settled_ = true;  // nothing that was begun can still go on
};

/// Runs work that throws Error where the driver refuses, on a thread of its own, and returns at the deadline or soon
/// after it. The work owns all that it uses.
PairVerdict run_work(std::function<PairVerdict()> work, const Deadline& deadline);

/// Fills a part of a region and waits until that is done. Where it hangs, the region stays until the process ends.
PairVerdict fill_now(const std::shared_ptr<DeviceDriver>& driver, const std::shared_ptr<DeviceRegion>& region,
                     size_t offset, uint8_t value, size_t bytes, const Deadline& deadline);

}  // namespace nvx
