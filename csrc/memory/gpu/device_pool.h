#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "memory/gpu/growing_region.h"
#include "memory/shm/arena.h"
#include "memory/shm/spans.h"

namespace nvx {

/// Memory of one device of this process that is handed out to users, and that other processes of the host can map. It
/// grows as it is asked for more, and none of it goes back to the driver, so that what peers have mapped stays what it
/// is.
class DevicePool {
 public:
  struct Options {
    ShareKind kind = ShareKind::kFd;        ///< or kFabric
    std::chrono::milliseconds patience{0};  ///< how long this process waits for its own device
    std::function<void()> open_door = [] {
    };  ///< called before the first memory is made; who comes there may ask for it
  };

  /// Reserves addresses for as much memory as the device has. Throws Error.
  DevicePool(std::shared_ptr<DeviceDriver> driver, int device, Options options);

  /// Memory at a multiple of 64 KiB, with whatever was there before. Throws Error where the device has no more, in a
  /// forked child, and where the driver does not return, which is asked for no more memory from then on.
  DevicePtr allocate(size_t bytes) EXCLUDES(mutex_);
  /// Gives memory back. Others may have it at once, so the caller must know that no work of the device is left that
  /// touches it. False: allocate() did not give it.
  bool free(DevicePtr at) EXCLUDES(mutex_);

  /// The offset of these bytes from base(), if all of them are the pool's. It is asked at every launch, so it takes no
  /// lock and makes no call.
  std::optional<uint64_t> offset_of(const void* at, uint64_t bytes) const {
    const uint64_t offset = reinterpret_cast<DevicePtr>(at) - region_->base(), grown = this->grown();
    if (bytes == 0 || offset >= grown || bytes > grown - offset) return {};
    return offset;
  }
  /// Bytes from base() with memory behind them. Only grows.
  uint64_t grown() const { return region_->mapped(); }
  DevicePtr base() const { return region_->base(); }
  int device() const { return region_->device(); }
  const ArenaId& id() const { return id_; }
  ShareKind kind() const { return options_.kind; }
  /// Bytes that are handed out.
  size_t used() { return book_.used(); }
  /// To be held by calls that may outlive the pool, and by those who hand its segments out.
  const std::shared_ptr<GrowingRegion>& region() const { return region_; }

 private:
  void grow(uint64_t bytes) REQUIRES(mutex_);

  const ArenaId id_ = random_arena_id();
  const Options options_;
  const pid_t made_by_;
  uint64_t granule_ = 0;
  std::shared_ptr<GrowingRegion> region_;
  SpanBook book_;
  Mutex mutex_;
  bool stuck_ GUARDED_BY(mutex_) = false;  // the driver has not returned from making memory
  std::map<DevicePtr, Span> handed_out_ GUARDED_BY(mutex_);
};

}  // namespace nvx
