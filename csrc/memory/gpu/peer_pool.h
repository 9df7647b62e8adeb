#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "memory/gpu/device_pool.h"
#include "memory/gpu/pool_door.h"

namespace nvx {

/// The pool of another rank's device, as one of this process's devices sees it: mapped as far as somebody has asked.
class PeerPool {
 public:
  virtual ~PeerPool() = default;
  /// 0 while nothing is mapped; then it stays as it is.
  virtual DevicePtr base() const = 0;
  /// Bytes from base() that the device may use, written after base(). Only grows.
  uint64_t mapped() const { return mapped_.load(std::memory_order_acquire); }

  /// Maps what is missing, segment by segment, until it reaches so far. Blocks, in the driver too, which may hang.
  /// Throws Error; what was mapped stays.
  void catch_up(uint64_t grown, const Deadline& deadline) EXCLUDES(mutex_);

  /// Called when catch_up() has not returned in time: nobody is to try it again.
  void give_up() { given_up_.store(true, std::memory_order_release); }
  bool is_given_up() const { return given_up_.load(std::memory_order_acquire); }

 protected:
  /// Maps the segment of this number, and returns where it ends.
  virtual uint64_t map_next(uint64_t segment, const Deadline& deadline) = 0;

 private:
  Mutex mutex_;  // one at a time
  uint64_t segments_ GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> mapped_{0};
  std::atomic<bool> given_up_{false};
};

/// A pool of another process, as that process's card names it.
struct PoolOwner {
  ArenaId home;
  int device = -1;
  std::string door;
};
std::shared_ptr<PeerPool> pool_behind_door(std::shared_ptr<DeviceDriver> driver, int device, const PoolOwner& owner);
/// Of this process, for another one of its devices, or the same. made: the owner's pool, null until there is one.
std::shared_ptr<PeerPool> pool_beside(int device, std::function<DevicePool*()> made);

}  // namespace nvx
