#include "memory/shm/leases.h"

#include <algorithm>

#include "base/error.h"

namespace nvx {

Span LeasePool::acquire(size_t wanted, size_t least, LeaseHolder* requester) {
  MutexLock lock(mutex_);
  if (leased_ + wanted > most_) {
    wanted = least;
    reclaim(wanted, requester);
  }
  const size_t left = most_ > leased_ ? most_ - leased_ : 0;
  size_t bytes = wanted;
  if (wanted > left) bytes = std::max(left / 2 / kSmallest * kSmallest, kSmallest);  // leave some for the next caller
  const Span span = allocate(bytes);
  leased_ += span.bytes;
  if (requester) {
    std::erase(holders_, requester);
    holders_.push_back(requester);
  }
  return span;
}

/// Fewer bytes if the arena has no free span of this size.
Span LeasePool::allocate(size_t bytes) {
  for (;; bytes = std::max(bytes / 2 / kSmallest * kSmallest, kSmallest)) {
    try {
      return arena_.allocate(bytes);
    } catch (const Error&) {
      if (bytes <= kSmallest) throw;
    }
  }
}

void LeasePool::release(Span span) {
  MutexLock lock(mutex_);
  leased_ -= span.bytes;
  arena_.free(span);
}

void LeasePool::free_when(Span span, std::function<bool()> released) {
  arena_.free_when(span, [this, bytes = span.bytes, released = std::move(released)] {
    if (!released()) return false;
    leased_ -= bytes;
    return true;
  });
}

void LeasePool::join(LeaseHolder* holder) {
  MutexLock lock(mutex_);
  holders_.push_back(holder);
}

void LeasePool::leave(LeaseHolder* holder) {
  MutexLock lock(mutex_);
  std::erase(holders_, holder);
}

void LeasePool::reclaim(size_t wanted, const LeaseHolder* requester) {
  for (LeaseHolder* holder : holders_) {
    if (leased_ + wanted <= most_) return;
    if (holder == requester) continue;
    while (leased_ + wanted > most_) {
      const Span span = holder->release_idle();
      if (!span) break;
      leased_ -= span.bytes;
      arena_.free(span);
    }
  }
}

}  // namespace nvx
