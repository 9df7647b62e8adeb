#include "torch/registry.h"

#include "base/per_process.h"
#include "net/wire.h"
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

void Registry::abort_all() {
  MutexLock lock(mutex_);
  for (ProcessGroupNVX* pg : groups_) {
    for (const auto& group : pg->groups()) group->abort("its process exits");
  }
}

void stop_everything() {
  exiting.store(true);
  Engine::here().stop(std::chrono::milliseconds(100));
  if (Engine::here().threads() != 0) {
    Registry::here().abort_all();
    Engine::here().stop(std::chrono::milliseconds(500));
  }
  HooksBeside::await_all();
  if (const auto wire = net::Wire::opened()) wire->finish();
}

}  // namespace nvx
