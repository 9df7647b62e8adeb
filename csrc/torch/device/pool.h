#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "kernel/gpu/capture.h"
#include "memory/gpu/device_pool.h"

/// Allocates blocks of a device's pool for torch's allocator. That allocator splits them among tensors, and reuses them
/// in the order of the stream that they were allocated for.
namespace nvx {

class PoolBlocks {
 public:
  explicit PoolBlocks(DevicePool& pool) : pool_(pool) {}

  /// Returns null if the pool is exhausted; torch then frees its cached blocks and calls again. Work of `stream` on the
  /// block is ordered after earlier work of other streams on it.
  void* allocate(size_t bytes, void* stream) EXCLUDES(mutex_);
  /// No tensor uses the block any more, but this stream may not have reached its last use yet.
  void release(void* at, size_t bytes, void* stream) EXCLUDES(mutex_);

 private:
  struct Pending {
    DevicePtr at;
    size_t bytes;
    std::unique_ptr<kernel::TailEvent> tail;  // the stream's position when the block was returned
  };
  void free_passed() REQUIRES(mutex_);
  std::unique_ptr<kernel::TailEvent> spare_tail() REQUIRES(mutex_);
  DevicePtr reuse_pending(size_t bytes, void* stream) REQUIRES(mutex_);

  DevicePool& pool_;
  Mutex mutex_;
  std::list<Pending> pending_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernel::TailEvent>> spare_
      GUARDED_BY(mutex_);  // tails are never destroyed, so they are reused
};

/// Whether this process has a pool on that device, or can make one. A local call.
bool has_pool(c10::DeviceIndex device);

/// A tensor of that many elements in the pool of its device. torch makes it, through `nvx/pool.py`.
at::Tensor pool_tensor(int64_t size, const at::TensorOptions& options);

}  // namespace nvx
