#include "torch/hook.h"

#include <condition_variable>
#include <system_error>
#include <thread>

#include "base/deadline.h"
#include "torch/interrupt.h"

namespace nvx {
namespace {

/// How many are running, in all.
struct Count {
  Mutex mutex;
  std::condition_variable changed;
  int running GUARDED_BY(mutex) = 0;
};

Count& count() {
  static auto* const kCount = new Count;
  return *kCount;
}

}  // namespace

struct HooksBeside::Running {
  const Clock::time_point began = Clock::now();
  bool ended = false;  // guarded by the count's lock
};

HooksBeside::HooksBeside(std::function<void()> hooks) : running_(std::make_shared<Running>()) {
  Count& all = count();
  {
    MutexLock lock(all.mutex);
    ++all.running;
  }
  const auto run = [hooks, &all, running = running_] {
    {
      static auto* const kOneAtATime = new Mutex;  // as if one thread ran them all
      MutexLock turn(*kOneAtATime);
      hooks();
    }
    MutexLock lock(all.mutex);
    --all.running;
    running->ended = true;
    all.changed.notify_all();
  };
  try {
    std::thread(run).detach();
  } catch (const std::system_error&) {
    run();
  }
}

void HooksBeside::await_moment() const {
  without_python_lock([&] {
    Count& all = count();
    MutexLock lock(all.mutex);
    for (auto left = kMoment; !running_->ended && left.count() > 0;) {
      lock.wait_for(all.changed, left);
      left = kMoment - std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - running_->began);
    }
  });
}

void HooksBeside::await_all(std::chrono::milliseconds most) {
  const auto end = Clock::now() + most;
  Count& all = count();
  MutexLock lock(all.mutex);
  while (all.running > 0 && Clock::now() < end) lock.wait_for(all.changed, std::chrono::milliseconds(100));
}

}  // namespace nvx
