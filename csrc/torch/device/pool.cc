#include "torch/device/pool.h"

#include <c10/core/DeviceGuard.h>
#include <sys/types.h>

#include <map>

#include "base/contain.h"
#include "base/log.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "memory/gpu/device_arena.h"
#include "torch/streams/staging_copies.h"

namespace nvx {

void* PoolBlocks::allocate(size_t bytes, void* stream) {
  const RelaxedCaptureGuard relaxed;
  MutexLock lock(mutex_);
  free_passed();
  if (const DevicePtr at = reuse_pending(bytes, stream)) return reinterpret_cast<void*>(at);
  try {
    return reinterpret_cast<void*>(pool_.allocate(bytes));
  } catch (const Error& error) {
    NVX_LOG(kInfo, "%s", without_name(error.what()).c_str());
    return nullptr;
  }
}

void PoolBlocks::release(void* at, size_t bytes, void* stream) {
  const RelaxedCaptureGuard relaxed;
  MutexLock lock(mutex_);
  free_passed();
  // A block that a graph may use again cannot be reused, nor can one whose last use has no event to wait for.
  std::unique_ptr<kernel::TailEvent> tail = kernel::capture_of(stream) == 0 ? spare_tail() : nullptr;
  if (!tail || !tail->record(stream, /*capture=*/0).ok()) {
    NVX_LOG(kInfo, "%zu KiB of the pool of GPU %d are not used again: no event reports when their last use has ended",
            bytes >> 10, pool_.device());
    return;
  }
  pending_.push_back({reinterpret_cast<DevicePtr>(at), bytes, std::move(tail)});
}

/// Frees the blocks whose streams have passed their last use.
void PoolBlocks::free_passed() {
  for (auto one = pending_.begin(); one != pending_.end();) {
    if (!one->tail->passed()) {
      ++one;
      continue;
    }
    (void)pool_.free(one->at);
    spare_.push_back(std::move(one->tail));
    one = pending_.erase(one);
  }
}

std::unique_ptr<kernel::TailEvent> PoolBlocks::spare_tail() {
  if (spare_.empty()) return std::make_unique<kernel::TailEvent>();
  std::unique_ptr<kernel::TailEvent> tail = std::move(spare_.back());
  spare_.pop_back();
  return tail;
}

/// Returns a block of exactly this size whose stream has not passed its last use. The new stream waits for that; the
/// host does not.
DevicePtr PoolBlocks::reuse_pending(size_t bytes, void* stream) {
  if (kernel::capture_of(stream) != 0) return 0;
  for (auto one = pending_.begin(); one != pending_.end(); ++one) {
    if (one->bytes != bytes || !one->tail->block(stream, /*captured=*/false).ok()) continue;
    const DevicePtr at = one->at;
    spare_.push_back(std::move(one->tail));
    pending_.erase(one);
    return at;
  }
  return 0;
}

namespace {

/// One per device, never destroyed: torch may free memory at the very end of the process.
PoolBlocks* blocks_of(int device) {
  static Mutex mutex;
  static auto* const kAll = new std::map<int, std::unique_ptr<PoolBlocks>>;
  DevicePool& pool = DeviceRegistry::instance().pool(device);
  MutexLock lock(mutex);
  std::unique_ptr<PoolBlocks>& blocks = (*kAll)[device];
  if (!blocks) blocks = std::make_unique<PoolBlocks>(pool);
  return blocks.get();
}

template <class Act>
void with_blocks(int device, Act act) {
  contain("a pool of GPU memory", [&] {
    const c10::OptionalDeviceGuard on(c10::Device(kernel_device(), c10::DeviceIndex(device)));
    act(*blocks_of(device));
  });
}

}  // namespace

bool has_pool(c10::DeviceIndex device) {
  if (!kernel::built_with_cuda()) return false;
  try {
    (void)DeviceRegistry::instance().pool(device);
    return true;
  } catch (const Error& error) {
    NVX_LOG(kTrace, "no pool on GPU %d: %s", int(device), without_name(error.what()).c_str());
    return false;
  }
}

}  // namespace nvx

#pragma GCC visibility push(default)

// torch's `CUDAPluggableAllocator` calls these with its own lock held, and perhaps the GIL. They must not release the
// GIL: the thread that gets it may wait for the allocator's lock.
extern "C" {

void* nvx_pool_malloc(ssize_t bytes, int device, void* stream) {
  void* at = nullptr;
  nvx::with_blocks(device, [&](nvx::PoolBlocks& blocks) { at = blocks.allocate(size_t(bytes), stream); });
  return at;
}

void nvx_pool_free(void* at, size_t bytes, int device, void* stream) {
  if (!at) return;
  nvx::with_blocks(device, [&](nvx::PoolBlocks& blocks) { blocks.release(at, bytes, stream); });
}
}

#pragma GCC visibility pop
