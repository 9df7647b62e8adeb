#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "memory/gpu/device_memory.h"

namespace nvx {

/// A range of addresses that is given memory segment by segment, none of which is taken away again. So a place in it is
/// an offset from its base, both for the process that has made the memory and for those that have mapped it. Its
/// destructor gives everything back.
class GrowingRegion {
 public:
  struct Segment {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    DeviceMemory memory = 0;
  };

  /// Reserves room for so many bytes, a multiple of the device's granularity. Throws Error.
  GrowingRegion(std::shared_ptr<DeviceDriver> driver, int device, uint64_t room);
  ~GrowingRegion() = default;
  GrowingRegion(const GrowingRegion&) = delete;
  GrowingRegion& operator=(const GrowingRegion&) = delete;

  /// Adds the next segment, for this device to use. The region owns it from here on, even if this throws Error.
  void append(DeviceMemory memory, uint64_t bytes) EXCLUDES(mutex_);
  /// Lets another device of this process use a segment. Throws Error.
  void open_to(const Segment& segment, int device);

  DevicePtr base() const { return base_; }
  uint64_t room() const { return room_; }
  int device() const { return device_; }
  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }
  /// Bytes from the base with memory behind them. Only grows.
  uint64_t mapped() const { return mapped_.load(std::memory_order_acquire); }
  size_t segments() const EXCLUDES(mutex_);
  Segment segment(size_t n) const EXCLUDES(mutex_);

 private:
  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const uint64_t room_;
  DevicePtr base_ = 0;
  std::atomic<uint64_t> mapped_{0};
  mutable Mutex mutex_;
  std::vector<Segment> segments_ GUARDED_BY(mutex_);
  Undo undo_;
};

}  // namespace nvx
