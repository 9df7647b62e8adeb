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

/// Runs code of the user's in a place where nobody could catch what it throws: a thread of nvx's, or one that has other
/// hooks to run. The first time at each place it is said; it goes no further.
template <class Call>
void run_hook(const char* whose, Call&& call) {
  static std::atomic<bool> said{false};  // one for each place: each has a Call of its own
  contain_and(call, [&](const std::exception* error) {
    if (said.exchange(true)) return;
    if (error) {
      log_line("%s threw, and nvx goes on without it: %s", whose, error->what());
    } else {
      log_line("%s threw something that is no std::exception, and nvx goes on without it", whose);
    }
  });
}

/// Hooks that may take long, as torch's flight recorder does: they run on a thread of their own, where there is one,
/// and are waited for until they end, or a moment has passed.
class HooksBeside {
 public:
  explicit HooksBeside(std::function<void()> hooks);
  /// They have ended, or the moment has passed since they began.
  void await_moment() const;
  /// Of all that have been begun in this process: where their threads ended with it, Python would end it badly.
  /// Bounded; Ctrl-C ends it.
  static void await_all();

 private:
  static constexpr std::chrono::milliseconds kMoment{100};
  struct Running;
  std::shared_ptr<Running> running_;
};

/// Code of the user's, by number. It is made and goes with no lock held, and is not copied: each may need Python's
/// lock, whose holder may wait for this one.
template <class Hook>
class Hooks {
 public:
  /// False if it takes the place of another one.
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
    return std::any_of(hooks_.begin(), hooks_.end(), [&](const auto& entry) { return entry.second == hook; });
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
