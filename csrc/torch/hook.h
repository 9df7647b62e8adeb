#pragma once

#include <atomic>
#include <cstdint>
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
