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

/// How the ranks of a group tell each other how far their pools have grown: looked at before each launch.
struct PoolNews {
  std::function<void(uint64_t bytes)> tell = [](uint64_t) {};
  std::function<uint64_t(int rank)> told = [](int) { return 0; };
};

/// What has become of them, for whoever asks.
struct PoolStats {
  uint64_t grown = 0;            ///< bytes of this rank's own
  uint64_t used = 0;             ///< ... that torch's allocator has
  std::vector<uint64_t> mapped;  ///< bytes of each rank's, for this rank's kernels
  uint32_t direct = 0;           ///< pieces that went or came without staging; wraps
};

/// The pools of a group's ranks. What this rank's has grown by is told to the others; what theirs have is mapped beside
/// the launches, for kernels to find it in the views. Where that fails, its pair goes on by staging.
class DevicePools {
 public:
  struct Rank {
    std::optional<PoolOwner> owner;    ///< none: not reached in its device's memory, so never mapped
    kernel::PoolView* view = nullptr;  ///< for this rank's kernels
    std::string who;                   ///< "rank 3 (pid 4711, host a01)"
  };
  /// ranks: by rank, the own one without an owner. news: may be asked for as long as look() is called.
  DevicePools(DeviceHome& home, int device, std::string group, std::vector<Rank> ranks, PoolNews news);
  /// What is being mapped is not waited for; kernels that use the views have ended.
  ~DevicePools();
  DevicePools(const DevicePools&) = delete;
  DevicePools& operator=(const DevicePools&) = delete;

  /// Before a launch: tells, and has what is missing mapped. Waits for nothing, and allocates nothing where nothing has
  /// grown.
  void look();
  PoolStats stats() const;
  /// Kernels that may never end use the views: what is mapped stays so until the process ends.
  void keep();

 private:
  /// Of one peer, for its job too, which may outlive the group.
  struct Peer {
    std::string who, group;
    std::shared_ptr<PeerPool> pool;
    std::atomic<uint64_t> tried{0};  // how far it was asked for
    std::atomic<bool> busy{false};
    Mutex mutex;
    kernel::PoolView* view GUARDED_BY(mutex) = nullptr;  // null when the group has gone
    bool has_failed GUARDED_BY(mutex) = false;

    void catch_up(uint64_t grown, std::chrono::milliseconds patience) EXCLUDES(mutex);
    void say(const std::string& why) EXCLUDES(mutex);
    void show() EXCLUDES(mutex);
  };

  const PoolNews news_;
  const std::chrono::milliseconds patience_;
  const std::atomic<DevicePool*>& own_;
  std::atomic<uint64_t> said_{0};
  std::vector<std::shared_ptr<Peer>> peers_;  // by rank; null: none
};

}  // namespace nvx
