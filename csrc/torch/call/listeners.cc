#include "torch/call/listeners.h"

namespace nvx {

std::function<void(NvxWork&)> Listeners::of_ends(const std::shared_ptr<Muted>& muted) {
  if (!any()) return {};
  return [this, muted, kept = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend_)](NvxWork& work) {
    report_end(work, *muted);
  };
}

std::function<void(Code)> Listeners::of_failures(const std::shared_ptr<Muted>& muted) {
  if (!any()) return {};
  return [this, muted, kept = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend_)](Code code) {
    report_failure(code, *muted);
  };
}

bool Listeners::set_on_completion(OnCompletion&& hook) {
  auto kept = std::make_shared<const OnCompletion>(std::move(hook));
  MutexLock lock(mutex_);
  const bool first = on_completion_ == nullptr;
  if (first) {
    on_completion_.swap(kept);
    hooked_at_ = Clock::now();
    count(1);
  }
  lock.unlock();
  return first;
}

void Listeners::report_end(NvxWork& work, [[maybe_unused]] Muted& muted) {
  std::shared_ptr<const OnCompletion> on_completion;
  {
    MutexLock lock(mutex_);
    if (work.began() >= hooked_at_) on_completion = on_completion_;  // not for works that began before the hook
  }
  if (on_completion) {
    run_hook("a completion hook", [&] {
      const std::chrono::duration<float> active = work.duration();
      (*on_completion)(
          std::make_shared<c10d::WorkInfo>(work.type(), work.getSequencenumber(), work.began(), work.ended(), active));
    });
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  if (const Status failure = work.failure(); !failure.ok() || work.lost())
    return report_failure(failure.ok() ? Code::kSystem : failure.code(), muted);
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  c10d::CompletionHookArgs args;
  args.completionKey = work.getCompletionKey();
  if (work.is_timed()) args.duration_ms = work.duration().count();
  for (const auto& hook : completion_hooks_.all()) run_hook("a completion hook", [&] { (*hook)(args); });
#endif
}

void Listeners::report_failure(Code code, Muted& muted) {
  if (code == Code::kInvalid || code == Code::kInterrupted || exiting.load()) return;
  if (muted.exchange(true)) return;
  run_abort_hooks();
}

void Listeners::report_abort(Muted& muted) {
  muted = true;
  run_abort_hooks();
}

/// On a thread of their own: that of torch 2.15's flight recorder takes seconds, and the caller waits a moment only.
void Listeners::run_abort_hooks() {
#ifdef C10D_BACKEND_HAS_HOOKS
  auto hooks = abort_hooks_.all();
  if (hooks.empty()) return;
  const auto kept = c10::intrusive_ptr<c10d::Backend>::reclaim_copy(&backend_);  // hooks may use it
  const auto run = [this, kept, hooks = std::move(hooks)] {
    for (const auto& hook : hooks) {
      if (abort_hooks_.has(hook)) run_hook("an abort hook", *hook);
    }
  };
  if (exiting.load()) return run();  // at the end of the process the thread would not be joined
  HookThread(run).await_briefly();
#endif
}

}  // namespace nvx
