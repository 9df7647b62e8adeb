#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace nvx {

/// Runs in each forked child from now on. For a static: `static const bool kRegistered = in_forked_children(...)`.
inline bool in_forked_children(void (*run)()) { return pthread_atfork(nullptr, nullptr, run) == 0; }

/// The one T of this process. A forked child gets a new one, because the parent's may have been locked at the fork. It
/// is never destroyed: threads may use it after static destructors ran.
template <class T>
T& of_this_process() {
  static T* here = new T;
  [[maybe_unused]] static const bool kRegistered = in_forked_children([] { here = new T; });
  return *here;
}

/// The live T of this process, for threads that do not own them. A forked child has none: the parent's are not its own.
template <class T>
class LiveObjects {
 public:
  static LiveObjects& instance() { return of_this_process<LiveObjects>(); }
  void add(T& one) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    all_.push_back(&one);
  }
  /// When this returns, no other thread uses the object through the list.
  void remove(T& one) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::erase(all_, &one);
  }
  /// Calls `body(T&)` for each, with the lock held.
  template <class Body>
  void each(const Body& body) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (T* one : all_) body(*one);
  }

 private:
  Mutex mutex_;
  std::vector<T*> all_ GUARDED_BY(mutex_);
};

/// Keeps an object, reachable, until the process ends, because a device may still use it.
template <class T>
void keep_until_exit(T object) {
  static Mutex mutex;
  static auto* const kKept = new std::vector<T>;
  MutexLock lock(mutex);
  kKept->push_back(std::move(object));
}

/// Grows by one in each forked child, once requested. It shows the child which objects belong to the parent.
inline uint32_t fork_generation() {
  static std::atomic<uint32_t> forks{0};
  [[maybe_unused]] static const bool kRegistered =
      in_forked_children([] { forks.fetch_add(1, std::memory_order_relaxed); });
  return forks.load(std::memory_order_relaxed);
}

}  // namespace nvx
