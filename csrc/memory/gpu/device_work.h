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
  kHung,  ///< was begun and is not known to have ended, so it may continue
  kCorrupt,
};

struct PairVerdict {
  PairState state = PairState::kFine;
  std::string why;
  bool fine() const { return state == PairState::kFine; }
};

/// Work for a device, in order. Work that was begun and is not known to have ended may continue as long as the process
/// lives. Then the stream and all memory that the work accesses stay as long too, even if all owners release them.
class DeviceWork {
 public:
  /// `touches`: the memory that the work accesses. Throws Error.
  DeviceWork(std::shared_ptr<DeviceDriver> driver, int device, std::vector<std::shared_ptr<DeviceRegion>> touches);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;

  /// copy() and fill() begin work. They throw Error if the driver refuses; that work has then not begun.
  void copy(DevicePtr to, DevicePtr from, size_t bytes);
  void fill(DevicePtr to, uint8_t value, size_t bytes);
  /// The stream, for a caller that enqueues other work on it; drain() waits for that too.
  DeviceStream external_stream() {
    settled_ = false;
    return stream_;
  }
  /// Waits, with pauses, for all work that was begun. False if it does not end in time. Throws Error if a query fails.
  bool drain(const Deadline& deadline, std::chrono::microseconds pause = std::chrono::microseconds(20));
  /// Runs steps. If the driver refuses one, returns kHung if earlier work may continue; otherwise it rethrows.
  PairVerdict carry_out(const std::function<PairVerdict()>& steps);

 private:
  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const std::vector<std::shared_ptr<DeviceRegion>> touches_;
  DeviceStream stream_ = 0;
  bool settled_ = true;  // no work that was begun can still continue
};

/// Runs work on a thread of its own and returns at the deadline or soon after it. The work owns all that it uses, and
/// throws Error if the driver refuses.
PairVerdict run_work(std::function<PairVerdict()> work, const Deadline& deadline);

/// Begins work, by `begin`, on a stream of its own, and waits until it is complete. `what`: the work, for messages. If
/// it hangs, the memory that it touches stays until the process ends.
PairVerdict work_now(const std::shared_ptr<DeviceDriver>& driver, int device,
                     const std::vector<std::shared_ptr<DeviceRegion>>& touches, const std::string& what,
                     const std::function<void(DeviceWork&)>& begin, const Deadline& deadline);

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

/// Checks a pair by moving data through pinned memory, since the driver's report is no proof. Returns at the deadline
/// or soon after it. A driver call that does not return keeps its own thread. Memory that an unfinished copy may still
/// access is kept.
PairVerdict run_check(const std::shared_ptr<PinnedMemory>& pinned, const PairCheck& check, const Deadline& deadline);

}  // namespace nvx
