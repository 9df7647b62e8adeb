#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/contain.h"
#include "base/mutex.h"

namespace nvx {

/// The exit of the process has begun: a thread that then needs the GIL is killed.
inline std::atomic<bool> exiting{false};

/// Runs user code at a place where no caller could catch its exception: on one of nvx's threads, or between other
/// hooks. The exception is logged the first time at each place in nvx's code, and not rethrown.
template <class Call>
void run_hook(const char* whose, Call&& call) {
  static std::atomic<bool> logged{false};  // one for each place, because each has its own type Call
  contain_and(call, [&](const std::exception* error) {
    if (logged.exchange(true)) return;
    if (error) {
      log_line("%s raised an exception, which nvx ignores: %s", whose, error->what());
    } else {
      log_line("%s threw something that is no std::exception; nvx ignores it", whose);
    }
  });
}

/// A thread for hooks that may take long, such as that of torch's flight recorder. Without a thread they run on the
/// caller's.
class HookThread {
 public:
  explicit HookThread(std::function<void()> hooks);
  /// Returns when they have ended, or 100 ms after they began.
  void await_briefly() const;
  /// Waits, for a bounded time or until Ctrl-C, for all hooks that run: a thread in Python may crash an ending process.
  static void await_all();

 private:
  static constexpr std::chrono::milliseconds kBriefWait{100};
  struct Running;
  std::shared_ptr<Running> running_;
};

/// User hooks by number. None is made, copied or destroyed while the mutex is held: that may need the GIL, and the
/// thread that holds the GIL may wait for the mutex.
template <class Hook>
class Hooks {
 public:
  /// Returns false if it replaces another hook.
  bool put(int64_t id, Hook&& hook) EXCLUDES(mutex_) {
    auto kept = std::make_shared<const Hook>(std::move(hook));
    MutexLock lock(mutex_);
    kept.swap(hooks_[id]);
    lock.unlock();
    return kept == nullptr;
  }
  bool drop(int64_t id) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const auto dropped = hooks_.extract(id);
    lock.unlock();
    return !dropped.empty();
  }
  bool has(const std::shared_ptr<const Hook>& hook) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return std::ranges::any_of(hooks_, [&](const auto& entry) { return entry.second == hook; });
  }
  std::vector<std::shared_ptr<const Hook>> all() const EXCLUDES(mutex_) {
    std::vector<std::shared_ptr<const Hook>> all;
    MutexLock lock(mutex_);
    for (const auto& [id, hook] : hooks_) all.push_back(hook);
    return all;
  }

 private:
  mutable Mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_ GUARDED_BY(mutex_);
};

}  // namespace nvx
