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

/// A std::mutex that clang's -Wthread-safety can check.
class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  /// Asserts to the checker that the caller holds the mutex where the checker cannot see it.
  void held_by_caller() const ASSERT_CAPABILITY(this) {}

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a Mutex for a scope. It can be unlocked and locked again, and can wait for a condition.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  /// Takes over a lock that try_lock() has got.
  MutexLock(Mutex& mutex, std::adopt_lock_t) REQUIRES(mutex) : lock_(mutex.mutex_, std::adopt_lock) {}
  ~MutexLock() RELEASE() = default;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }

  /// Sleeps until notified or until the span of the steady clock is over. Wake-ups can be spurious: check again.
  void wait_for(std::condition_variable& cv, std::chrono::nanoseconds span) {
    cv.wait_until(lock_, std::chrono::steady_clock::now() + span);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace nvx
