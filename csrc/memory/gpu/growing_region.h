#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "memory/gpu/device_memory.h"

namespace nvx {

/// A range of addresses to which memory is mapped segment by segment, for good. So a place is an offset from the base,
/// in every process that maps the memory. The destructor returns everything.
class GrowingRegion {
 public:
  struct Segment {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    DeviceMemory memory = 0;
  };

  /// Reserves `room` bytes of addresses, a multiple of the device's granularity. Throws Error.
  GrowingRegion(std::shared_ptr<DeviceDriver> driver, int device, uint64_t room);

  /// Maps the next segment for this device. The region owns `memory` from here on, even if this throws Error.
  void append(DeviceMemory memory, uint64_t bytes) EXCLUDES(mutex_);
  /// Lets another device of this process access a segment. Throws Error.
  void allow_access(const Segment& segment, int device);
  /// The same for all devices of this process whose access the driver permits: torch copies between devices on its own,
  /// and its peer access does not cover virtual memory. Ignores errors, as no rank may ever use that access.
  void allow_peers(const Segment& segment);

  DevicePtr base() const { return base_; }
  uint64_t room() const { return room_; }
  int device() const { return device_; }
  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }
  /// The mapped bytes from the base. Only grows. Acquire: the segments up to there are mapped.
  uint64_t mapped() const { return mapped_.load(std::memory_order_acquire); }
  size_t segments() const EXCLUDES(mutex_);
  Segment segment(size_t n) const EXCLUDES(mutex_);

 private:
  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const uint64_t room_;
  Undo undo_;
  const DevicePtr base_;
  std::atomic<uint64_t> mapped_{0};
  mutable Mutex mutex_;
  std::vector<Segment> segments_ GUARDED_BY(mutex_);
};

}  // namespace nvx
