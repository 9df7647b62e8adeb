#include "memory/gpu/growing_region.h"

#include <utility>

#include "base/error.h"

namespace nvx {

GrowingRegion::GrowingRegion(std::shared_ptr<DeviceDriver> driver, int device, uint64_t room)
    : driver_(std::move(driver)), device_(device), room_(room), base_(reserve(*driver_, device, room, undo_)) {}

void GrowingRegion::append(DeviceMemory memory, uint64_t bytes) {
  Undo half;  // until the segment is complete
  own_memory(*driver_, memory, half);
  const uint64_t offset = mapped();
  NVX_CHECK(bytes > 0 && bytes <= room_ - offset,
            "addresses are reserved for only " + std::to_string(room_ >> 20) + " MiB");
  map(*driver_, device_, base_ + offset, bytes, memory, half);
  undo_.add([kept = std::make_shared<Undo>(std::move(half))] {});
  MutexLock lock(mutex_);
  segments_.push_back({offset, bytes, memory});
  mapped_.store(offset + bytes, std::memory_order_release);
}

void GrowingRegion::allow_access(const Segment& segment, int device) {
  if (device == device_) return;
  check_driver(*driver_, driver_->allow(device_, base_ + segment.offset, segment.bytes, device), "cuMemSetAccess",
               device);
}

void GrowingRegion::allow_peers(const Segment& segment) {
  int devices = 0;
  (void)driver_->count(&devices);
  for (int peer = 0; peer < devices; ++peer) {
    bool can = false;
    if (peer == device_ || driver_->can_reach(peer, device_, &can) || !can) continue;
    (void)driver_->allow(device_, base_ + segment.offset, segment.bytes, peer);
  }
}

size_t GrowingRegion::segments() const {
  MutexLock lock(mutex_);
  return segments_.size();
}

GrowingRegion::Segment GrowingRegion::segment(size_t n) const {
  MutexLock lock(mutex_);
  return n < segments_.size() ? segments_[n] : Segment{};
}

}  // namespace nvx
