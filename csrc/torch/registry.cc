#include "torch/registry.h"

#include "base/per_process.h"
#include "net/messenger.h"
#include "net/tcp/job_key.h"
#include "torch/communicator.h"
#include "torch/core/hook.h"

namespace nvx {
Registry& Registry::here() { return of_this_process<Registry>(); }

void Registry::add(Communicator& one) {
  MutexLock lock(mutex_);
  all_.insert(&one);
}

void Registry::remove(Communicator& one) {
  MutexLock lock(mutex_);
  all_.erase(&one);
}

void Registry::see_off_proxies() {
  const Deadline deadline = Deadline::after(Communicator::kMostForProxies);
  MutexLock lock(mutex_);
  for (Communicator* one : all_) one->issuer.see_off(deadline);
}

void Registry::abort_all() {
  MutexLock lock(mutex_);
  for (Communicator* one : all_) {
    for (const auto& group : one->context.groups.all()) group->abort("its process exits");
  }
}

/// Threads of the pool must not run while the process and its stores are torn down. The slowest thread is rank 0's
/// while it makes a group: it notices within one slice of its wait for the store that the group is unwanted. Then it
/// waits up to 0.8 s until the other ranks know, because it may serve their store.
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
  const auto messenger = net::Messenger::opened();
  if (!messenger) return;
  messenger->finish();
  if (net::JobKey::here()) messenger->close();  // libcrypto, which its handshakes use, is torn down too
}

}  // namespace nvx
