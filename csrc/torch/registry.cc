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

void Registry::each(const std::function<void(Communicator&)>& body) {
  MutexLock lock(mutex_);
  for (Communicator* one : all_) body(*one);
}

/// Threads of the pool must not run while the process and its stores are torn down. The slowest thread is rank 0's
/// while it makes a group: it notices within one slice of its wait for the store that the group is unwanted. Then it
/// waits up to 0.8 s until the other ranks know, because it may serve their store.
void stop_everything() {
  constexpr std::chrono::milliseconds kLast{2500};
  exiting.store(true);
  const Deadline deadline = Deadline::after(Communicator::kMostForProxies);
  Registry::here().each([&](Communicator& one) { one.issuer.see_off(deadline); });
  Engine::here().stop(std::chrono::milliseconds(100));
  if (Engine::here().threads() != 0) {
    Registry::here().each([](Communicator& one) {
      for (const auto& group : one.context.groups.all()) group->abort("its process exits");
    });
    Engine::here().stop(kLast);
  }
  HooksBeside::await_all();
  const auto messenger = net::Messenger::opened();
  if (!messenger) return;
  messenger->finish();
  if (net::JobKey::here()) messenger->close();  // libcrypto, which its handshakes use, is torn down too
}

}  // namespace nvx
