#include "memory/device_arena.h"

#include <cstring>

#include "base/error.h"
#include "memory/driver_library.h"

namespace nvx {
namespace {

constexpr size_t kPage = 65536;

std::string name_of(int device) { return "the shared memory of GPU " + std::to_string(device); }

}  // namespace

DeviceArena::DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes)
    : driver_(std::move(driver)),
      region_(DeviceRegion::make(driver_, device, kind, bytes)),
      book_(bytes, kPage, name_of(device), [](Span) {}) {}

void DeviceArena::open_window() {
  if (window_) return;
  Fd fd = make_host_window(region_->bytes());
  window_ = DeviceRegion::pin(driver_, region_->device(), fd.get(), region_->bytes());
  window_fd_ = std::move(fd);
}

const DeviceRegion& DeviceArena::window() {
  MutexLock lock(mutex_);
  open_window();
  return *window_;
}

int DeviceArena::window_fd() {
  MutexLock lock(mutex_);
  open_window();
  return window_fd_.get();
}

Span DeviceArena::allocate(size_t bytes) {
  constexpr std::chrono::milliseconds kPatience{5000};
  const Span span = book_.allocate(bytes);
  bool zeroed = false;
  try {
    zeroed = fill_now(driver_, region_->device(), at(span.offset), 0, span.bytes, Deadline::after(kPatience));
  } catch (const Error&) {
    free(span);
    throw;
  }
  if (!zeroed) {
    quarantine(span);
    throw Error(Code::kTimeout, "nvx: GPU " + std::to_string(region_->device()) + " did not fill " +
                                    std::to_string(span.bytes >> 10) + " KiB of its memory within " +
                                    std::to_string(kPatience.count() / 1000) +
                                    " s: is it in use by something that hangs?");
  }
  MutexLock lock(mutex_);
  if (window_) std::memset(window_->host() + span.offset, 0, span.bytes);
  return span;
}

DeviceHome& DeviceHome::here() {
  static DeviceHome* const kHome = new DeviceHome(driver_library());  // never destroyed: others may have it mapped
  return *kHome;
}

DeviceArena& DeviceHome::arena(int device, ShareKind kind) {
  MutexLock lock(mutex_);
  std::unique_ptr<DeviceArena>& arena = arenas_[device];
  if (!arena) {
    const size_t granule = share_granularity(*driver_, device, kind);
    arena = std::make_unique<DeviceArena>(driver_, device, kind, (arena_bytes_ + granule - 1) / granule * granule);
  }
  return *arena;
}

DeviceArena* DeviceHome::made(int device) {
  MutexLock lock(mutex_);
  const auto it = arenas_.find(device);
  return it == arenas_.end() ? nullptr : it->second.get();
}

std::shared_ptr<DeviceRegion> DeviceHome::find(const Import& import) {
  MutexLock lock(mutex_);
  const auto it = imports_.find(import);
  return it == imports_.end() ? nullptr : it->second.lock();
}

void DeviceHome::adopt(const Import& import, const std::shared_ptr<DeviceRegion>& region) {
  MutexLock lock(mutex_);
  std::erase_if(imports_, [](const auto& entry) { return entry.second.expired(); });
  imports_[import] = region;
}

void DeviceHome::distrust(const Import& import, const std::string& why) {
  MutexLock lock(mutex_);
  distrusted_[import] = why;
}

std::string DeviceHome::distrusted(const Import& import) {
  MutexLock lock(mutex_);
  const auto it = distrusted_.find(import);
  return it == distrusted_.end() ? "" : it->second;
}

}  // namespace nvx
