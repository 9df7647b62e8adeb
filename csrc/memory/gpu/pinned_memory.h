#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "memory/driver/device_driver.h"

namespace nvx {

class DeviceRegion;

/// Pinned host memory of this process. None is unpinned before the process ends: the driver may unpin only when all
/// kernels have ended, and those of other groups may wait for this rank.
class PinnedMemory : public std::enable_shared_from_this<PinnedMemory> {
 public:
  explicit PinnedMemory(std::shared_ptr<DeviceDriver> driver);
  ~PinnedMemory();

  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }

  /// At least this many bytes, which are zero. The last reference gives them to later callers, unless a hanging device
  /// may still use them (`DeviceRegion::abandon()`). May hang if no memory is spare. Throws Error.
  std::shared_ptr<DeviceRegion> get(int device, size_t bytes) EXCLUDES(mutex_);

 private:
  std::unique_ptr<DeviceRegion> take_spare(int device, size_t bytes) EXCLUDES(mutex_);
  void put_back(std::unique_ptr<DeviceRegion> region) EXCLUDES(mutex_);

  const std::shared_ptr<DeviceDriver> driver_;
  Mutex mutex_;
  std::multimap<std::pair<int, size_t>, std::unique_ptr<DeviceRegion>> spares_ GUARDED_BY(mutex_);  // by device, size
};

}  // namespace nvx
