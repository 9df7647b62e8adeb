#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "memory/gpu/device_pool.h"
#include "memory/gpu/pool_server.h"

namespace nvx {

/// The pool of another rank's device at addresses of one of this process's devices, mapped up to the requested size.
class PeerPool {
 public:
  virtual ~PeerPool() = default;
  /// 0 while nothing is mapped; then constant.
  virtual DevicePtr base() const = 0;
  /// The bytes from base() that the device may access. Only grows. Acquire: if it is not 0, base() is set.
  uint64_t mapped() const { return mapped_.load(std::memory_order_acquire); }

  /// Maps missing segments in order until `grown` bytes are mapped. It blocks, also in the driver, which may hang.
  /// Throws Error; segments that were mapped stay.
  void map_up_to(uint64_t grown, const Deadline& deadline) EXCLUDES(mutex_);

  /// Called when map_up_to() has not returned in time: nothing tries it again.
  void give_up() { given_up_.store(true, std::memory_order_release); }
  bool is_given_up() const { return given_up_.load(std::memory_order_acquire); }

 protected:
  /// Maps the segment of this number and returns the offset of its end.
  virtual uint64_t map_next(uint64_t segment, const Deadline& deadline) = 0;

 private:
  Mutex mutex_;  // one caller at a time
  uint64_t segments_ GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> mapped_{0};
  std::atomic<bool> given_up_{false};
};

/// Runs map_up_to() on a thread of its own. Throws Error, also if it does not return in time. `what`: in that text.
void map_on_thread(const std::string& what, const std::shared_ptr<PeerPool>& pool, uint64_t grown,
                   const Deadline& deadline);

/// A pool of another process, as that process describes it.
struct PoolOwner {
  ArenaId process;
  int device = -1;
  std::string socket;
};
std::shared_ptr<PeerPool> remote_pool(std::shared_ptr<DeviceDriver> driver, int device, const PoolOwner& owner);
/// A pool of this process, for one of its devices. `made` returns the owner's pool, or null until it exists.
std::shared_ptr<PeerPool> local_pool(int device, std::function<DevicePool*()> made);

}  // namespace nvx
