#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_memory.h"
#include "memory/gpu/device_pool.h"
#include "memory/gpu/peer_pool.h"
#include "memory/gpu/pool_server.h"
#include "memory/shm/arena.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

/// The memory of one device that this process shares. It is created once and allocated in spans to all groups. Other
/// processes may keep it mapped as long as they live, so none of it returns to the driver before the process ends.
class DeviceArena {
 public:
  /// How long this process waits for its own device.
  static constexpr std::chrono::milliseconds kTimeout{20'000};

  DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes,
              std::chrono::milliseconds timeout = kTimeout);

  const ArenaId& id() const { return id_; }
  const DeviceRegion& region() const { return *region_; }
  /// The region, for calls that may outlive the arena.
  const std::shared_ptr<DeviceRegion>& hold() const { return region_; }
  DevicePtr at(size_t offset) const { return region_->base() + offset; }

  /// Pinned host memory of the same size and offsets, for pairs that cannot access each other's device memory. The
  /// first call makes it. Throws Error, with kTimeout if the driver does not return.
  const std::shared_ptr<DeviceRegion>& hold_fallback() { return open_fallback().region; }
  int fallback_fd() { return open_fallback().fd.get(); }

  /// Allocates a zeroed span, zeroed in the fallback too. Throws Error if the arena is full or the device is silent.
  Span allocate(size_t bytes);
  void free(Span span) { spans_.free(span); }
  void free_when(Span span, std::function<bool()> released) { spans_.free_when(span, std::move(released)); }
  /// Retires a span for ever, because a hanging device may still write to it. Its memory is never returned.
  void quarantine(Span span);
  size_t used() { return spans_.used(); }
  size_t room() { return region_->bytes() - for_messages(region_->bytes()) - used(); }
  /// The end of the arena, for messages. They take nothing from what groups agree on at their set-up.
  SpanAllocator& messages() { return messages_; }
  static constexpr size_t for_messages(size_t bytes) { return bytes > 4 * kForMessages ? kForMessages : 0; }
  static constexpr size_t kForMessages = size_t(16) << 20;

 private:
  struct HostFallback {
    Fd fd;
    std::shared_ptr<DeviceRegion> region;
  };
  HostFallback& open_fallback();

  const ArenaId id_ = random_arena_id();
  const std::shared_ptr<DeviceDriver> driver_;
  const std::shared_ptr<DeviceRegion> region_;
  const std::chrono::milliseconds timeout_;
  SpanAllocator spans_, messages_;
  CreatedOnce<HostFallback> fallback_;
};

/// The device memory that this process shares, and the memory of other processes that it has mapped. There is one per
/// process; tests create several to simulate several processes.
class DeviceRegistry {
 public:
  static constexpr size_t kArenaBytes = (size_t(64) << 20) + DeviceArena::kForMessages;

  /// This process's, over libcuda. It lives until the process ends. Throws Error if there is no driver.
  static DeviceRegistry& instance();

  /// `timeout`: how long this process waits for its own devices.
  explicit DeviceRegistry(std::shared_ptr<DeviceDriver> driver, size_t arena_bytes = kArenaBytes,
                          std::chrono::milliseconds timeout = DeviceArena::kTimeout)
      : driver_(std::move(driver)),
        pinned_(std::make_shared<PinnedMemory>(driver_)),
        arena_bytes_(arena_bytes),
        timeout_(timeout) {}

  const ArenaId& id() const { return id_; }
  const std::shared_ptr<DeviceDriver>& driver() const { return driver_; }
  const std::shared_ptr<PinnedMemory>& pinned() const { return pinned_; }

  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Like probe_share_kinds(), but does not try a kind again that has hung before, nor any once there is an arena: the
  /// driver may free memory only when all kernels have ended, and those of other groups may wait for this rank.
  ShareProbe probe(int device, std::chrono::milliseconds timeout) EXCLUDES(mutex_);

  /// The arena of a device, shared by all groups. The first call makes it, with the kind that its ranks agreed on;
  /// others return it whatever its kind, so check that. Throws Error, with kTimeout if the driver does not return.
  DeviceArena& arena(int device, ShareKind kind) EXCLUDES(mutex_);
  /// Null until the arena exists.
  DeviceArena* made(int device) EXCLUDES(mutex_);

  /// Another process's memory as mapped for a device, once for all groups. An arena and its fallback are two imports.
  struct Import {
    ArenaId arena;
    ShareKind kind;
    int device;
    auto operator<=>(const Import&) const = default;
  };
  std::shared_ptr<DeviceRegion> find(const Import& import) EXCLUDES(mutex_);
  void adopt(const Import& import, const std::shared_ptr<DeviceRegion>& region) EXCLUDES(mutex_);

  /// The pool of a device, from which all user memory is allocated. The first call creates it. Throws Error if the
  /// device's memory cannot be shared this way, which is remembered, or kTimeout if the driver does not return.
  DevicePool& pool(int device) EXCLUDES(mutex_);
  /// Null until the pool exists. The reference stays valid, so it can be read without a lock.
  const std::atomic<DevicePool*>& made_pool(int device) EXCLUDES(mutex_);
  /// The socket at which other processes request the memory of this process's pools. It is open once a pool has memory.
  const std::string& pool_socket() const { return pool_socket_; }
  /// Another rank's pool as this device sees it, mapped once for all groups, for as long as anyone holds it.
  std::shared_ptr<PeerPool> peer_pool(int device, const PoolOwner& owner) EXCLUDES(mutex_);

  /// Marks an import that is not to be tried again, because it hung or corrupted data. `until_returned`: only as long
  /// as the call that maps it holds this. why_unusable(): the reason, or an empty text.
  void mark_unusable(const Import& import, const std::string& why,
                     const std::shared_ptr<const void>& until_returned = nullptr) EXCLUDES(mutex_);
  std::string why_unusable(const Import& import) EXCLUDES(mutex_);

 private:
  struct Pooled {
    CreatedOnce<DevicePool> making;
    std::atomic<DevicePool*> made{nullptr};
    std::optional<Error> why_not;
    std::string last_logged;  // the last logged reason why there was no pool
  };
  Pooled& pooled(int device) EXCLUDES(mutex_);
  [[noreturn]] void refuse_pool(int device, const ShareProbe& found) EXCLUDES(mutex_);
  void open_pool_server() EXCLUDES(mutex_);
  PoolReply serve(const PoolRequest& request, Fd* fd) EXCLUDES(mutex_);

  const ArenaId id_ = random_arena_id();
  std::shared_ptr<DeviceDriver> driver_;
  const std::shared_ptr<PinnedMemory> pinned_;
  const size_t arena_bytes_;
  const std::chrono::milliseconds timeout_;
  Mutex mutex_;
  std::map<int, CreatedOnce<DeviceArena>> arenas_ GUARDED_BY(mutex_);  // entries are never removed
  std::map<int, ShareProbe> probes_ GUARDED_BY(mutex_);                // the last result for each device
  std::map<Import, std::weak_ptr<DeviceRegion>> imports_ GUARDED_BY(mutex_);
  struct Unusable {
    std::string why;
    bool until_returned = true;
    std::weak_ptr<const void> call;
  };
  std::map<Import, Unusable> unusable_ GUARDED_BY(mutex_);
  std::map<int, Pooled> pools_ GUARDED_BY(mutex_);  // entries are never removed
  struct Seen {
    int by;
    ArenaId process;
    int device;
    auto operator<=>(const Seen&) const = default;
  };
  std::map<Seen, std::weak_ptr<PeerPool>> peer_pools_ GUARDED_BY(mutex_);
  const std::string pool_socket_ = unique_socket_name();
  std::unique_ptr<PoolServer> pool_server_ GUARDED_BY(mutex_);
};

}  // namespace nvx
