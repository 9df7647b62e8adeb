// Memory of a device that others hand out: what torch.cuda.MemPool is over a CUDAPluggableAllocator. What a pool is
// given is kept whole, and used again in the order of the stream that had it. Unlike other memory of the device, a host
// that touches it is not killed: it is where it says it is.
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
  // Null where there is no more, also when all that is kept has been given back.
  void* take(size_t room, Queue& home);
  void keep(void* at, size_t room, Queue& home);
  // Gives back what nobody uses.
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

// A number for a new pool; whose memory this thread is handed out, until the same is said with the one before.
int64_t new_pool(int64_t device, int64_t malloc, int64_t free);
Pool& pool_of(int64_t number);
Pool* exchange_pool(Pool* pool);
Pool* current_pool(int device);

// Which device's pool an address is in; -1: none's.
int device_of_pooled(const void* address);

}  // namespace fake
