#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define NVX_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define NVX_THREAD_ANNOTATION(x)
#endif
#define CAPABILITY(x) NVX_THREAD_ANNOTATION(capability(x))
#define SCOPED_CAPABILITY NVX_THREAD_ANNOTATION(scoped_lockable)
#define GUARDED_BY(x) NVX_THREAD_ANNOTATION(guarded_by(x))
#define REQUIRES(...) NVX_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) NVX_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) NVX_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) NVX_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define RETURN_CAPABILITY(x) NVX_THREAD_ANNOTATION(lock_returned(x))
#define ASSERT_CAPABILITY(x) NVX_THREAD_ANNOTATION(assert_capability(x))
#define EXCLUDES(...) NVX_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace nvx {

/// std::mutex that clang's -Wthread-safety can check.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  /// Tells the checker what a caller that it cannot see through has promised.
  void held_by_caller() const ASSERT_CAPABILITY(this) {}

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a Mutex for a scope; may be let go and taken again inside it, and may wait for a condition.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RELEASE() = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }

  /// Sleeps until notified, the time is up, or for no reason at all: ask your condition again. Whoever sets the wall
  /// clock does not change how long that is.
  void wait_for(std::condition_variable& cv, std::chrono::nanoseconds span) {
    cv.wait_until(lock_, std::chrono::steady_clock::now() + span);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace nvx
