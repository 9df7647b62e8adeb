#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "kernel/gpu/capture.h"
#include "memory/gpu/device_pool.h"

/// Gives torch's allocator blocks of a device's pool. It cuts them up among tensors, and uses them again in the order
/// of the stream that they were asked for.
namespace nvx {

class PoolLender {
 public:
  explicit PoolLender(DevicePool& pool) : pool_(pool) {}

  /// Null if there is no more: then torch gives back what it has cached, and asks again. What the stream does with the
  /// block comes behind what other streams did with it before.
  void* lend(size_t bytes, void* stream) EXCLUDES(mutex_);
  /// No tensor uses the block any more, but this stream may have yet to come to where it was used.
  void take_back(void* at, size_t bytes, void* stream) EXCLUDES(mutex_);

 private:
  struct Resting {
    DevicePtr at;
    size_t bytes;
    std::unique_ptr<kernel::Tail> tail;  // how far the stream had been given work when the block came back
  };
  void settle() REQUIRES(mutex_);
  std::unique_ptr<kernel::Tail> spare_tail() REQUIRES(mutex_);
  DevicePtr take_resting(size_t bytes, void* stream) REQUIRES(mutex_);

  DevicePool& pool_;
  Mutex mutex_;
  std::list<Resting> resting_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernel::Tail>> spare_
      GUARDED_BY(mutex_);  // tails are never destroyed, so they are used again
};

/// Whether this process has a pool on that device, or can make one. Does not ask the other ranks.
bool has_pool(c10::DeviceIndex device);

/// A tensor of so many elements in the pool of its device. torch makes it, asked by nvx/pool.py.
at::Tensor pool_tensor(int64_t size, const at::TensorOptions& options);

}  // namespace nvx
