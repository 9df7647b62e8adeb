#include "group/device/device_pools.h"

#include <utility>

#include "base/contain.h"
#include "base/log.h"
#include "base/per_process.h"
#include "group/core/thread_pool.h"
#include "memory/driver/thread_call.h"

namespace nvx {

DevicePools::DevicePools(DeviceRegistry& registry, int device, std::string group, std::vector<Rank> ranks,
                         PoolSizes sizes, std::function<void()> show_all)
    : sizes_(std::move(sizes)), timeout_(registry.timeout()), own_(registry.made_pool(device)), peers_(ranks.size()) {
  bool is_any_mapped = false;  // by another group
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!ranks[r].owner) continue;
    auto peer = std::make_shared<Peer>();
    peer->name = std::move(ranks[r].name);
    peer->group = group;
    peer->pool = registry.peer_pool(device, *ranks[r].owner);
    {
      MutexLock lock(peer->mutex);
      peer->view = ranks[r].view;
    }
    peer->show_all = show_all;
    is_any_mapped |= peer->show();
    peers_[r] = std::move(peer);
  }
  if (is_any_mapped) show_all();
}

DevicePools::~DevicePools() {
  for (const auto& peer : peers_) {
    if (!peer) continue;
    MutexLock lock(peer->mutex);
    peer->view = nullptr;
  }
  destroy_on_thread("unmapping other ranks' memory pools", std::move(peers_), timeout_);
}

void DevicePools::keep() {
  for (const auto& peer : peers_) {
    if (peer) keep_until_exit(peer->pool);
  }
}

void DevicePools::update() {
  if (const DevicePool* own = own_.load(std::memory_order_acquire)) {
    if (published_.load(std::memory_order_relaxed) != own->grown()) {
      MutexLock lock(publish_mutex_);
      const uint64_t grown = own->grown();
      sizes_.publish(grown);
      published_.store(grown, std::memory_order_relaxed);
    }
  }
  for (size_t r = 0; r < peers_.size(); ++r) {
    const std::shared_ptr<Peer>& peer = peers_[r];
    if (!peer) continue;
    const uint64_t grown = sizes_.read(int(r));
    if (grown <= peer->tried.load(std::memory_order_acquire) || peer->pool->is_given_up()) continue;
    if (peer->busy.exchange(true, std::memory_order_acq_rel)) continue;
    const bool begun = ThreadPool::instance().start([last = peer, grown, timeout = timeout_]() mutable {
      const RelaxedCaptureGuard relaxed;
      const auto peer = std::move(last);  // the group may have ended: the pool is then unmapped here, under the guard
      peer->map_up_to(grown, timeout);
    });
    if (!begun) peer->busy.store(false, std::memory_order_release);  // the next launch tries again
  }
}

PoolStats DevicePools::stats() const {
  PoolStats stats;
  if (DevicePool* own = own_.load(std::memory_order_acquire)) stats.grown = own->grown(), stats.used = own->used();
  for (const auto& peer : peers_) stats.mapped.push_back(peer ? peer->pool->mapped() : 0);
  return stats;
}

/// A failed mapping is retried after the pool has grown further; a mapping that hangs is not.
void DevicePools::Peer::map_up_to(uint64_t grown, std::chrono::milliseconds timeout) {
  try {
    const Deadline deadline = Deadline::after(timeout);
    map_on_thread("mapping the pool", pool, grown, deadline);
  } catch (const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known && known->code() == Code::kTimeout) pool->give_up();
    contain("logging why transfers are staged", [&] { log_failure(without_name(error.what())); });
  }
  if (show()) show_all();
  tried.store(grown, std::memory_order_release);
  busy.store(false, std::memory_order_release);
}

/// Logs the first failure of a peer at a visible level, since the same failure may repeat.
void DevicePools::Peer::log_failure(const std::string& why) {
  MutexLock lock(mutex);
  const bool again = std::exchange(has_failed, true);
  if (!logs(again ? LogLevel::kInfo : LogLevel::kWarn)) return;
  log_line(
      "group %s: the memory pool of %s cannot be mapped completely here, so transfers from the rest are staged: %s",
      group.c_str(), name.c_str(), why.c_str());
}

/// Whether there is anything for kernels to use.
bool DevicePools::Peer::show() {
  const uint64_t mapped = pool->mapped();
  MutexLock lock(mutex);
  if (!view || mapped == 0) return false;
  std::atomic_ref(view->base).store(pool->base(), std::memory_order_release);
  std::atomic_ref(view->mapped).store(mapped, std::memory_order_release);
  return true;
}

}  // namespace nvx
