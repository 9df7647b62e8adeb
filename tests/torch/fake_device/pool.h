// Device memory from other allocators: the counterpart of `torch.cuda.MemPool` over a `CUDAPluggableAllocator`. A pool
// keeps whole blocks and reuses them in the order of the stream that had them. Unlike other memory of the device, its
// addresses are mapped: a host access does not fault.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "queue.h"

namespace fake {

class Pool {
 public:
  using Malloc = void* (*)(ssize_t bytes, int device, void* stream);
  using Free = void (*)(void* at, size_t bytes, int device, void* stream);
  Pool(int device, Malloc malloc, Free free) : device_(device), malloc_(malloc), free_(free) {}

  int device() const { return device_; }
  // Null if the allocator has no memory left, even after all kept blocks were returned to it.
  void* take(size_t room, Queue& home);
  void keep(void* at, size_t room, Queue& home);
  // Returns unused blocks to the allocator.
  void empty();

 private:
  struct Kept {
    void* at;
    size_t room;
    Queue* home;
  };
  const int device_;
  const Malloc malloc_;
  const Free free_;
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

// `new_pool()` returns the number of a new pool. `exchange_pool()` sets the pool that serves the calling thread, and
// returns the previous one.
int64_t new_pool(int64_t device, int64_t malloc, int64_t free);
Pool& pool_of(int64_t number);
Pool* exchange_pool(Pool* pool);
Pool* current_pool(int device);

// The device of the pool that holds the address; -1: no pool holds it.
int device_of_pooled(const void* address);

}  // namespace fake
