#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>

#include "base/mutex.h"
#include "torch/call/work.h"
#include "torch/core/hook.h"

namespace nvx {

/// Whether hooks are no longer called for failures of a communicator: true after the first one, since later ones have
/// the same cause.
using Muted = std::atomic<bool>;

/// Runs torch's hooks for the ends of a backend's operations. No hook runs, is copied or is destroyed while the mutex
/// is held. The backend stays alive while a hook runs, because the hook may call it.
class Listeners {
 public:
  using OnCompletion = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  explicit Listeners(c10d::Backend& backend) : backend_(backend) {}

  bool any() const { return listeners_.load(std::memory_order_acquire) != 0; }
  /// For operations that begin now: functions to call at their end, and at a failure that no work reports, or empty.
  std::function<void(NvxWork&)> of_ends(const std::shared_ptr<Muted>& muted);
  std::function<void(Code)> of_failures(const std::shared_ptr<Muted>& muted);

  /// A wrong argument and Ctrl-C are no failures of the group. Neither is the end of the process, where a thread in a
  /// hook that needs the GIL would be killed.
  void report_failure(Code code, Muted& muted);
  /// For an abort: runs the abort hooks, and waits a moment for them.
  void report_abort(Muted& muted);

  /// Returns false if there is a hook already.
  bool set_on_completion(OnCompletion&& hook) EXCLUDES(mutex_);
#ifdef C10D_BACKEND_HAS_HOOKS
  void put_abort_hook(int64_t id, c10d::AbortHook hook) { count(abort_hooks_.put(id, std::move(hook)) ? 1 : 0); }
  void drop_abort_hook(int64_t id) { count(abort_hooks_.drop(id) ? -1 : 0); }
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  void put_completion_hook(int64_t id, c10d::CompletionHook hook) {
    count(completion_hooks_.put(id, std::move(hook)) ? 1 : 0);
  }
  void drop_completion_hook(int64_t id) { count(completion_hooks_.drop(id) ? -1 : 0); }
#endif

  std::atomic<bool> timed{false};  ///< works measure their duration

 private:
  void report_end(NvxWork& work, Muted& muted) EXCLUDES(mutex_);
  void count(int change) { listeners_.fetch_add(change, std::memory_order_release); }
  void run_abort_hooks();

  c10d::Backend& backend_;
  std::atomic<int> listeners_{0};
  Mutex mutex_;
  std::shared_ptr<const OnCompletion> on_completion_ GUARDED_BY(mutex_);
  Clock::time_point hooked_at_ GUARDED_BY(mutex_);
#ifdef C10D_BACKEND_HAS_HOOKS
  Hooks<c10d::AbortHook> abort_hooks_;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  Hooks<c10d::CompletionHook> completion_hooks_;
#endif
};

}  // namespace nvx
