#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "memory/driver/apart.h"
#include "memory/gpu/device_memory.h"
#include "memory/gpu/device_pool.h"
#include "memory/gpu/peer_pool.h"
#include "memory/gpu/pool_door.h"
#include "memory/shm/arena.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

/// The memory of one device that this process lets others map. It is made once and handed out in spans to all groups.
/// Others may keep it mapped for as long as they live, so none of it goes back to the driver before the process ends.
class DeviceArena : public SpanSource {
 public:
  /// How long this process waits for its own device.
  static constexpr std::chrono::milliseconds kPatience{20'000};

  DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes,
              std::chrono::milliseconds patience = kPatience);

  const ArenaId& id() const { return id_; }
  const DeviceRegion& region() const { return *region_; }
  /// The same, to be held by calls that may outlive the arena.
  const std::shared_ptr<DeviceRegion>& hold() const { return region_; }
  DevicePtr at(size_t offset) const { return region_->base() + offset; }

  /// The fallback: pinned host memory of the same size, in which each span has a part at its own offset. It is for
  /// pairs that cannot reach each other's device memory, and is made when first asked for. Throws Error, of kTimeout
  /// when the driver does not return.
  const DeviceRegion& host_fallback() { return *open_fallback().region; }
  const std::shared_ptr<DeviceRegion>& hold_fallback() { return open_fallback().region; }
  int fallback_fd() { return open_fallback().fd.get(); }

  /// The span is zeroed, in the fallback too. Throws Error when the arena is full, or the device does not answer.
  Span allocate(size_t bytes) override;
  void free(Span span) override { book_.free(span); }
  void bury(Span span, std::function<bool()> released) override { book_.bury(span, std::move(released)); }
  /// For a span that a hanging device may yet write to: it is never handed out again, and its memory is never given
  /// back.
  void quarantine(Span span);
  size_t used() { return book_.used(); }

 private:
  struct HostFallback {
    Fd fd;
    std::shared_ptr<DeviceRegion> region;
  };
  HostFallback& open_fallback();

  const ArenaId id_ = random_arena_id();
  const std::shared_ptr<DeviceDriver> driver_;
  const std::shared_ptr<DeviceRegion> region_;
  const std::chrono::milliseconds patience_;
  SpanBook book_;
  MadeApart<HostFallback> fallback_;
};

/// What this process shares of its devices, and what it has mapped of others'. There is one in a process; tests make
/// more, to play several processes.
class DeviceHome {
 public:
  static constexpr size_t kArenaBytes = size_t(64) << 20;

  /// This process's, over libcuda. It stays until the process ends. Throws Error where there is no driver.
  static DeviceHome& here();

  /// patience: how long this process waits for its own devices.
  explicit DeviceHome(std::shared_ptr<DeviceDriver> driver, size_t arena_bytes = kArenaBytes,
                      std::chrono::milliseconds patience = DeviceArena::kPatience)
      : driver_(std::move(driver)), arena_bytes_(arena_bytes), patience_(patience) {}

  /// Tells processes apart.
  const ArenaId& id() const { return id_; }
  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }

  std::chrono::milliseconds patience() const { return patience_; }

  /// As probe_share_kinds(), but does not try again what has hung before.
  ShareProbe probe(int device, std::chrono::milliseconds patience) EXCLUDES(mutex_);

  /// The arena of a device, one for all groups. The first who asks has it made, of the kind that its ranks have agreed
  /// on. Whoever asks for another kind, later or meanwhile, gets the same arena all the same, and must look at its
  /// kind. Throws Error, of kTimeout when the driver does not return.
  DeviceArena& arena(int device, ShareKind kind) EXCLUDES(mutex_);
  /// Null until it is made.
  DeviceArena* made(int device) EXCLUDES(mutex_);

  /// Another process's memory as a device of this process sees it, mapped once for all groups. An arena and its
  /// fallback count as two.
  struct Import {
    ArenaId arena;
    ShareKind kind;
    int device;
    auto operator<=>(const Import&) const = default;
  };
  std::shared_ptr<DeviceRegion> find(const Import& import) EXCLUDES(mutex_);
  void adopt(const Import& import, const std::shared_ptr<DeviceRegion>& region) EXCLUDES(mutex_);

  /// The pool of a device, one for all that is handed out to users, made when first asked for. Throws Error where the
  /// device's memory cannot be shared in this way, which is then remembered; of kTimeout where the driver does not
  /// return.
  DevicePool& pool(int device) EXCLUDES(mutex_);
  /// Null until it is made. The reference stays valid, for looks without a lock.
  const std::atomic<DevicePool*>& made_pool(int device) EXCLUDES(mutex_);
  /// Where others ask for the memory of this process's pools; nobody listens before there is some.
  const std::string& pool_door() const { return pool_door_name_; }
  /// Another rank's pool as this device sees it, mapped once for all groups, for as long as somebody keeps it.
  std::shared_ptr<PeerPool> peer_pool(int device, const PoolOwner& owner) EXCLUDES(mutex_);

  /// An import that has once hung or corrupted data is not tried again. distrusted() says why; empty: nothing is known
  /// against it.
  void distrust(const Import& import, const std::string& why) EXCLUDES(mutex_);
  std::string distrusted(const Import& import) EXCLUDES(mutex_);

 private:
  struct Pooled {
    MadeApart<DevicePool> making;
    std::atomic<DevicePool*> made{nullptr};
    std::optional<Error> why_not;
    std::string told;  // why there was none when it was last asked for, as logged
  };
  Pooled& pooled(int device) EXCLUDES(mutex_);
  [[noreturn]] void refuse_pool(int device, const ShareProbe& found) EXCLUDES(mutex_);
  void open_pool_door() EXCLUDES(mutex_);
  PoolAnswer answer(const PoolQuestion& question, Fd* fd) EXCLUDES(mutex_);

  const ArenaId id_ = random_arena_id();
  std::shared_ptr<DeviceDriver> driver_;
  const size_t arena_bytes_;
  const std::chrono::milliseconds patience_;
  Mutex mutex_;
  std::map<int, MadeApart<DeviceArena>> arenas_ GUARDED_BY(mutex_);  // none of them ever goes
  std::map<int, ShareProbe> probes_ GUARDED_BY(mutex_);              // the last of each device
  std::map<Import, std::weak_ptr<DeviceRegion>> imports_ GUARDED_BY(mutex_);
  std::map<Import, std::string> distrusted_ GUARDED_BY(mutex_);
  std::map<int, Pooled> pools_ GUARDED_BY(mutex_);  // none of them ever goes
  struct Seen {
    int by;
    ArenaId home;
    int device;
    auto operator<=>(const Seen&) const = default;
  };
  std::map<Seen, std::weak_ptr<PeerPool>> peer_pools_ GUARDED_BY(mutex_);
  const std::string pool_door_name_ = fresh_socket_name();
  std::unique_ptr<PoolDoor> pool_door_ GUARDED_BY(mutex_);
};

}  // namespace nvx
