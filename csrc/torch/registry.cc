#include "torch/registry.h"

#include "base/per_process.h"
#include "net/messenger.h"
#include "torch/backend.h"

namespace nvx {
Registry& Registry::here() { return of_this_process<Registry>(); }

void Registry::add(ProcessGroupNVX& group) {
  MutexLock lock(mutex_);
  groups_.insert(&group);
}

void Registry::remove(ProcessGroupNVX& group) {
  MutexLock lock(mutex_);
  groups_.erase(&group);
}

void Registry::see_off_proxies() {
  const Deadline deadline = Deadline::after(ProcessGroupNVX::kMostForProxies);
  MutexLock lock(mutex_);
  for (ProcessGroupNVX* pg : groups_) pg->see_off_proxies(deadline);
}

void Registry::abort_all() {
  MutexLock lock(mutex_);
  for (ProcessGroupNVX* pg : groups_) {
    for (const auto& group : pg->groups()) group->abort("its process exits");
  }
}

/// Threads of the pool must not run while the process and its stores are torn down. The slowest thread is rank 0's
/// while it makes a group: it notices within one slice of its wait for the store that the group is unwanted. Then it
/// waits up to 1.5 s until the other ranks know, because it may serve their store.
void stop_everything() {
  constexpr std::chrono::milliseconds kLast{2500};
  exiting.store(true);
  Registry::here().see_off_proxies();
  Engine::here().stop(std::chrono::milliseconds(100));
  if (Engine::here().threads() != 0) {
    Registry::here().abort_all();
    Engine::here().stop(kLast);
  }
  HooksBeside::await_all();
  if (const auto messenger = net::Messenger::opened()) messenger->finish();
}

}  // namespace nvx
