#include "memory/gpu/growing_region.h"

#include <utility>

#include "base/error.h"

namespace nvx {

GrowingRegion::GrowingRegion(std::shared_ptr<DeviceDriver> driver, int device, uint64_t room)
    : driver_(std::move(driver)), device_(device), room_(room) {
  DeviceDriver* const raw = driver_.get();
  demand(*raw, raw->reserve(room, 0, &base_), "cuMemAddressReserve", device);
  undo_.add([raw, at = base_, room] { note_refusal(*raw, raw->unreserve(at, room), "cuMemAddressFree"); });
}

void GrowingRegion::append(DeviceMemory memory, uint64_t bytes) {
  DeviceDriver* const raw = driver_.get();
  Undo half;  // until the segment is complete
  half.add([raw, memory] { note_refusal(*raw, raw->release(memory), "cuMemRelease"); });
  const uint64_t offset = mapped();
  NVX_CHECK(bytes > 0 && bytes <= room_ - offset,
            "addresses are reserved for only " + std::to_string(room_ >> 20) + " MiB");
  const DevicePtr at = base_ + offset;
  demand(*raw, raw->map(at, bytes, memory), "cuMemMap of " + std::to_string(bytes) + " bytes", device_);
  half.add([raw, at, bytes] { note_refusal(*raw, raw->unmap(at, bytes), "cuMemUnmap"); });
  demand(*raw, raw->allow(at, bytes, device_), "cuMemSetAccess", device_);
  undo_.add([kept = std::make_shared<Undo>(std::move(half))] {});
  MutexLock lock(mutex_);
  segments_.push_back({offset, bytes, memory});
  mapped_.store(offset + bytes, std::memory_order_release);
}

void GrowingRegion::open_to(const Segment& segment, int device) {
  if (device == device_) return;
  demand(*driver_, driver_->allow(base_ + segment.offset, segment.bytes, device), "cuMemSetAccess", device);
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
