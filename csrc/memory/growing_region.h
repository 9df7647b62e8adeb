#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "memory/device_memory.h"

namespace nvx {

/// Addresses in a row behind which memory comes segment by segment, never to go: so a place in it is its base and an
/// offset, for who has made the memory as for who has mapped it. Gives all back when it goes.
class GrowingRegion {
 public:
  struct Segment {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    DeviceMemory memory = 0;
  };

  /// Room for so many bytes, a multiple of what the device asks for. Throws Error.
  GrowingRegion(std::shared_ptr<DeviceDriver> driver, int device, uint64_t room);
  ~GrowingRegion() = default;
  GrowingRegion(const GrowingRegion&) = delete;
  GrowingRegion& operator=(const GrowingRegion&) = delete;

  /// The next segment, for this device to use; the region's own from here on, also where this throws Error.
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
