#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "torch/core/hook.h"
#include "torch/work.h"

namespace nvx {

/// Torch's hooks for the ends of a backend's operations. A hook never runs, is copied or goes while the mutex
/// is held. It keeps the backend meanwhile, which it may ask.
class Listeners {
 public:
  using OnCompletion = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  explicit Listeners(c10d::Backend& backend) : backend_(backend) {}

  bool any() const { return listeners_.load(std::memory_order_acquire) != 0; }
  /// For operations that begin now: to be called at their end, and at a failure that comes without a work. Empty where
  /// there are no hooks.
  std::function<void(NvxWork&)> of_ends();
  std::function<void(Code)> of_failures();

  void tell(NvxWork& work) EXCLUDES(mutex_);
  /// Once: whatever fails after that fails of the same. A wrong argument and Ctrl-C are no failures of the group. Nor
  /// is the end of the process, in which hooks that need Python are killed on its threads.
  void tell_failure(Code code);
  /// For an abort: runs the abort hooks, and waits a moment for them.
  void tell_abort();
  /// No failure is told any more. False if one has been told, or this has been called.
  bool fall_silent() { return !silent_.exchange(true); }

  /// False if there is one already.
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

 private:
  void count(int change) { listeners_.fetch_add(change, std::memory_order_release); }
  std::optional<HooksBeside> begin_abort_hooks();

  c10d::Backend& backend_;
  std::atomic<int> listeners_{0};
  std::atomic<bool> silent_{false};
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
