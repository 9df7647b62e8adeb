#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "kernel/gpu/device_pad.h"
#include "memory/gpu/device_arena.h"

namespace nvx {

/// How ranks publish the sizes of their pools. Read before each launch and message.
struct PoolSizes {
  std::function<void(uint64_t bytes)> publish = [](uint64_t) {};
  std::function<uint64_t(int rank)> read = [](int) { return 0; };
};

struct PoolStats {
  uint64_t grown = 0;            ///< bytes of this rank's pool
  uint64_t used = 0;             ///< bytes of it that torch's allocator uses
  std::vector<uint64_t> mapped;  ///< by rank: bytes that this rank's kernels can access
  uint32_t direct = 0;           ///< pieces transferred without staging, in either direction; wraps
};

/// The pools of a group's ranks. Each rank publishes its pool's size; the others map the new part on a pool thread,
/// beside the launches, and show it to their kernels. If mapping fails, transfers with that peer stay staged.
class DevicePools {
 public:
  struct Rank {
    std::optional<PoolOwner> owner;  ///< empty if this peer's device memory is not reachable: its pool is never mapped
    kernel::PoolView* view = nullptr;  ///< for this rank's kernels, once `show_all` has copied it to them
    std::string name;                  ///< "rank 3 (pid 4711, host a01)"
  };
  /// `ranks`: by rank; this rank's entry has no owner. `sizes` is called during `update()` only. `show_all` copies the
  /// views to where kernels read them. It is called on any thread, also after the group has gone.
  DevicePools(DeviceRegistry& registry, int device, std::string group, std::vector<Rank> ranks, PoolSizes sizes,
              std::function<void()> show_all);
  /// Does not wait for mappings in progress. All kernels that use the views must have ended.
  ~DevicePools();

  /// Call before a launch or a message: publishes this rank's size and starts the mapping of missing parts.
  /// Non-blocking; allocates only if a pool has grown.
  void update();
  PoolStats stats() const;
  /// Null for this rank, and if the pool is not reachable.
  std::shared_ptr<PeerPool> of(int rank) const {
    const auto& peer = peers_[size_t(rank)];
    return peer ? peer->pool : nullptr;
  }
  /// For kernels that may never end and use the views: keeps the mappings until the process ends.
  void keep();

 private:
  /// One peer. Its mapping job shares it, and may outlive the group.
  struct Peer {
    std::string name, group;
    std::shared_ptr<PeerPool> pool;
    std::function<void()> show_all;
    std::atomic<uint64_t> tried{0};  // the size of the last request to map
    std::atomic<bool> busy{false};
    Mutex mutex;
    kernel::PoolView* view GUARDED_BY(mutex) = nullptr;  // null once the group has gone
    bool has_failed GUARDED_BY(mutex) = false;

    void map_up_to(uint64_t grown, std::chrono::milliseconds timeout) EXCLUDES(mutex);
    void log_failure(const std::string& why) EXCLUDES(mutex);
    bool show() EXCLUDES(mutex);
  };

  const PoolSizes sizes_;
  const std::chrono::milliseconds timeout_;
  const std::atomic<DevicePool*>& own_;
  Mutex publish_mutex_;  // the last one to publish publishes the latest size
  std::atomic<uint64_t> published_{0};
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank; null for ranks without an owner
};

}  // namespace nvx
