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

/// Memory of one device that this process allocates to users and that other processes of the host can map. It grows on
/// demand. None of it returns to the driver, so that mappings of peers stay valid.
class DevicePool {
 public:
  struct Options {
    ShareKind kind = ShareKind::kFd;       ///< kFd or kFabric
    std::chrono::milliseconds timeout{0};  ///< how long this process waits for its own device
    std::function<void()> start_server = [] {
    };  ///< called before the first memory is created; opens the socket at which peers request it
  };

  /// Reserves addresses for all memory of the device. Throws Error.
  DevicePool(std::shared_ptr<DeviceDriver> driver, int device, Options options);

  /// Allocates at a multiple of 64 KiB, without initialisation. Throws Error if the device has no memory left, in a
  /// forked child, and if the driver does not return; after that the pool grows no more.
  DevicePtr allocate(size_t bytes) EXCLUDES(mutex_);
  /// Frees memory, which may be allocated again at once. So the caller must know that no work of the device still
  /// accesses it. Returns false if allocate() did not return `at`.
  bool free(DevicePtr at) EXCLUDES(mutex_);

  /// Frees it once released() is true. See SpanAllocator.
  void free_when(DevicePtr at, std::function<bool()> released) EXCLUDES(mutex_);

  /// The offset of this range from base(), if all of it is the pool's. Without lock or system call, for every launch.
  std::optional<uint64_t> offset_of(const void* at, uint64_t bytes) const {
    const uint64_t offset = reinterpret_cast<DevicePtr>(at) - region_->base(), grown = this->grown();
    if (bytes == 0 || offset >= grown || bytes > grown - offset) return {};
    return offset;
  }
  /// The bytes from base() that are backed by memory. Only grows.
  uint64_t grown() const { return region_->mapped(); }
  DevicePtr base() const { return region_->base(); }
  int device() const { return region_->device(); }
  const ArenaId& id() const { return id_; }
  ShareKind kind() const { return options_.kind; }
  size_t used() { return spans_.used(); }
  /// The region, for calls that may outlive the pool and for exporting its segments.
  const std::shared_ptr<GrowingRegion>& region() const { return region_; }

 private:
  void grow(uint64_t bytes) REQUIRES(mutex_);
  Span forget(DevicePtr at) EXCLUDES(mutex_);

  const ArenaId id_ = random_arena_id();
  const Options options_;
  const pid_t made_by_;
  uint64_t granule_ = 0;
  std::shared_ptr<GrowingRegion> region_;
  SpanAllocator spans_;
  Mutex mutex_;
  bool stuck_ GUARDED_BY(mutex_) = false;  // the driver has not returned from creating memory
  std::map<DevicePtr, Span> allocated_ GUARDED_BY(mutex_);
};

}  // namespace nvx
