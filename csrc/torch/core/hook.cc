#include "torch/core/hook.h"

#include <condition_variable>
#include <system_error>
#include <thread>

#include "base/deadline.h"
#include "base/interrupt.h"
#include "base/per_process.h"
#include "base/thread_state.h"
#include "torch/core/interrupt.h"

namespace nvx {
namespace {

/// The number of threads with hooks in this process. They take turns, as if one thread ran all hooks.
struct Count {
  Mutex mutex;
  std::condition_variable changed;
  int running GUARDED_BY(mutex) = 0;
  Mutex turn;
};

thread_local bool in_hook = false;

Count& count() { return of_this_process<Count>(); }  // a forked child has none of its parent's threads

}  // namespace

struct HookThread::Running {
  const Clock::time_point began = Clock::now();
  bool ended = false;  // guarded by the count's lock
};

HookThread::HookThread(std::function<void()> hooks) : running_(std::make_shared<Running>()) {
  if (in_hook) {  // hooks do not run inside a hook
    running_->ended = true;
    return;
  }
  Count& all = count();
  {
    MutexLock lock(all.mutex);
    ++all.running;
  }
  const auto run = [&all, running = running_](std::function<void()>& hooks) {
    {
      MutexLock turn(all.turn);
      in_hook = true;
      hooks();
      hooks = nullptr;  // destroys its captures before it counts as ended
      in_hook = false;
    }
    MutexLock lock(all.mutex);
    --all.running;
    running->ended = true;
    all.changed.notify_all();
  };
  try {
    std::thread([run, hooks]() mutable {
      begin_own_thread("nvx-hooks");
      run(hooks);
    }).detach();
    hooks = nullptr;
  } catch (const std::system_error&) {
    without_python_lock([&] { run(hooks); });
  }
}

void HookThread::await_briefly() const {
  without_python_lock([&] {
    Count& all = count();
    MutexLock lock(all.mutex);
    for (auto left = kBriefWait; !running_->ended && left.count() > 0;) {
      lock.wait_for(all.changed, left);
      left = kBriefWait - std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - running_->began);
    }
  });
}

void HookThread::await_all() {
  if (in_hook) return;                       // a hook ends the process
  constexpr std::chrono::seconds kMost{40};  // torch gives its recorder 15 s, twice
  const auto end = Clock::now() + kMost;
  Count& all = count();
  MutexLock lock(all.mutex);
  while (all.running > 0 && Clock::now() < end) {
    lock.wait_for(all.changed, std::chrono::milliseconds(100));
    lock.unlock();
    const bool stop = stop_requested();
    lock.lock();
    if (stop) return;
  }
}

}  // namespace nvx
