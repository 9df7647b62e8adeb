#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "kernel/capture.h"
#include "memory/device_pool.h"

/// What torch's allocator of a device is given of its pool: blocks, which it cuts up among tensors and uses again in
/// the order of their stream.
namespace nvx {

class PoolLender {
 public:
  explicit PoolLender(DevicePool& pool) : pool_(pool) {}

  /// Null where there is no more, as torch wants it: it then gives back what it has cached, and asks again. What the
  /// stream does with it comes behind what another one did with it before.
  void* lend(size_t bytes, void* stream) EXCLUDES(mutex_);
  /// Nobody has it any more, but this stream may yet come to where it was used.
  void take_back(void* at, size_t bytes, void* stream) EXCLUDES(mutex_);

 private:
  struct Resting {
    DevicePtr at;
    size_t bytes;
    std::unique_ptr<kernel::Tail> tail;  // what the stream had been given then
  };
  void settle() REQUIRES(mutex_);
  std::unique_ptr<kernel::Tail> spare_tail() REQUIRES(mutex_);
  DevicePtr take_resting(size_t bytes, void* stream) REQUIRES(mutex_);

  DevicePool& pool_;
  Mutex mutex_;
  std::list<Resting> resting_ GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<kernel::Tail>> spare_ GUARDED_BY(mutex_);  // they are never destroyed, so used again
};

/// Whether this process has a pool on that device, or can make one; without the other ranks.
bool has_pool(c10::DeviceIndex device);

/// A tensor of so many elements in the pool of its device, as nvx/pool.py has torch make it.
at::Tensor pool_tensor(int64_t size, const at::TensorOptions& options);

}  // namespace nvx
