#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "memory/arena.h"
#include "memory/device_memory.h"

namespace nvx {

/// The memory of one device that this process lets others map: made once, handed out in spans to all groups. Others may
/// have it mapped as long as they live, so nothing of it goes back to the driver before the process ends.
class DeviceArena : public SpanSource {
 public:
  DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes);

  const ArenaId& id() const { return id_; }
  const DeviceRegion& region() const { return *region_; }
  DevicePtr at(size_t offset) const { return region_->base() + offset; }

  /// Pinned host memory of the same size, of which each span has its part at the same offset. For pairs that cannot
  /// reach each other's device memory; made when first asked for. Throws Error.
  const DeviceRegion& window() EXCLUDES(mutex_);
  int window_fd() EXCLUDES(mutex_);

  /// Zeroed, in the window too. Throws Error when the arena is full, or the device does not answer.
  Span allocate(size_t bytes) override EXCLUDES(mutex_);
  void free(Span span) override { book_.free(span); }
  void bury(Span span, std::function<bool()> released) override { book_.bury(span, std::move(released)); }
  /// A span that a device which hangs may yet write to: never handed out again.
  void quarantine(Span span) {
    book_.bury(span, [] { return false; });
  }
  size_t used() { return book_.used(); }

 private:
  void open_window() REQUIRES(mutex_);

  const ArenaId id_ = random_arena_id();
  std::shared_ptr<DeviceDriver> driver_;
  std::unique_ptr<DeviceRegion> region_;
  SpanBook book_;
  Mutex mutex_;
  Fd window_fd_ GUARDED_BY(mutex_);
  std::unique_ptr<DeviceRegion> window_ GUARDED_BY(mutex_);
};

/// What this process shares of its devices and has mapped of others'. One a process; tests make more, to play several
/// processes.
class DeviceHome {
 public:
  static constexpr size_t kArenaBytes = size_t(64) << 20;

  /// Of this process, over libcuda; stays until it ends. Throws Error where there is no driver.
  static DeviceHome& here();

  explicit DeviceHome(std::shared_ptr<DeviceDriver> driver, size_t arena_bytes = kArenaBytes)
      : driver_(std::move(driver)), arena_bytes_(arena_bytes) {}

  /// Tells processes apart.
  const ArenaId& id() const { return id_; }
  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }

  /// The arena of a device, made by the first who asks, in the kind that the ranks have agreed on. Throws Error.
  DeviceArena& arena(int device, ShareKind kind) EXCLUDES(mutex_);
  /// Null until it is made.
  DeviceArena* made(int device) EXCLUDES(mutex_);

  /// Another process's memory as this device sees it, mapped once for all groups. An arena and its window are two.
  struct Import {
    ArenaId arena;
    ShareKind kind;
    int device;
    auto operator<=>(const Import&) const = default;
  };
  std::shared_ptr<DeviceRegion> find(const Import& import) EXCLUDES(mutex_);
  void adopt(const Import& import, const std::shared_ptr<DeviceRegion>& region) EXCLUDES(mutex_);

  /// What has once hung or corrupted is not tried again. Empty: nothing is known against it.
  void distrust(const Import& import, const std::string& why) EXCLUDES(mutex_);
  std::string distrusted(const Import& import) EXCLUDES(mutex_);

 private:
  const ArenaId id_ = random_arena_id();
  std::shared_ptr<DeviceDriver> driver_;
  const size_t arena_bytes_;
  Mutex mutex_;
  std::map<int, std::unique_ptr<DeviceArena>> arenas_ GUARDED_BY(mutex_);
  std::map<Import, std::weak_ptr<DeviceRegion>> imports_ GUARDED_BY(mutex_);
  std::map<Import, std::string> distrusted_ GUARDED_BY(mutex_);
};

}  // namespace nvx
