// The pools of a process's devices: created, looked up by processes that map them, and handed out at their socket.

#include "base/log.h"
#include "memory/gpu/device_arena.h"

namespace nvx {

DeviceRegistry::Pooled& DeviceRegistry::pooled(int device) {
  MutexLock lock(mutex_);
  return pools_[device];
}

const std::atomic<DevicePool*>& DeviceRegistry::made_pool(int device) { return pooled(device).made; }

DevicePool& DeviceRegistry::pool(int device) {
  Pooled& here = pooled(device);
  if (DevicePool* made = here.made.load(std::memory_order_acquire)) return *made;
  {
    MutexLock lock(mutex_);
    if (here.why_not) throw Error(here.why_not->status());
  }
  const ShareProbe found = probe(device, patience_);
  const ShareKind kind = found.has(ShareKind::kFd) ? ShareKind::kFd : ShareKind::kFabric;
  if (!found.has(kind)) refuse_pool(device, found);
  DevicePool& made =
      here.making.get("making a pool on GPU " + std::to_string(device), Deadline::after(patience_),
                      [this, driver = driver_, device, kind, patience = patience_] {
                        return std::make_unique<DevicePool>(
                            driver, device, DevicePool::Options{kind, patience, [this] { open_pool_server(); }});
                      });
  here.made.store(&made, std::memory_order_release);
  return made;
}

/// Remembers what the device cannot do or did not return from, and does not ask for it again. The probe may also have
/// failed for lack of memory; that is logged once, and the next call tries again.
void DeviceRegistry::refuse_pool(int device, const ShareProbe& found) {
  const auto is_out = [&](ShareKind kind) { return !found.facts.can[int(kind)] || (found.hung >> int(kind) & 1) != 0; };
  Error error(Code::kSystem,
              "nvx: GPU " + std::to_string(device) +
                  " has no growing memory that other processes can map: " + found.why_not[int(ShareKind::kFd)]);
  MutexLock lock(mutex_);
  Pooled& here = pools_[device];
  if (here.last_logged != error.what()) NVX_LOG(kInfo, "%s", without_name(error.what()).c_str());
  here.last_logged = error.what();
  if (found.has(ShareKind::kPointer) && is_out(ShareKind::kFd) && is_out(ShareKind::kFabric)) here.why_not = error;
  throw error;
}

/// Without the socket the pool still serves this process.
void DeviceRegistry::open_pool_server() {
  MutexLock lock(mutex_);
  if (pool_server_) return;
  try {
    pool_server_ = std::make_unique<PoolServer>(
        pool_socket_, [this](const PoolQuestion& question, Fd* fd) { return answer(question, fd); });
  } catch (const Error& error) {
    NVX_LOG(kWarn, "other processes cannot map this process's GPU pool, so its tensors are staged: %s",
            without_name(error.what()).c_str());
  }
}

PoolAnswer DeviceRegistry::answer(const PoolQuestion& question, Fd* fd) {
  NVX_CHECK(question.process == id_, "the request is for another process");
  DevicePool* pool = nullptr;
  {
    MutexLock lock(mutex_);
    const auto found = pools_.find(question.device);
    if (found != pools_.end()) pool = found->second.made.load(std::memory_order_acquire);
  }
  const GrowingRegion::Segment segment = pool ? pool->region()->segment(question.segment) : GrowingRegion::Segment{};
  NVX_CHECK(segment.bytes > 0, "its pool has no such segment");
  PoolAnswer answer;
  answer.state = PoolAnswer::kHere;
  answer.kind = uint32_t(pool->kind());
  answer.pool = pool->id();
  answer.room = pool->region()->room();
  answer.offset = segment.offset;
  answer.bytes = segment.bytes;
  const DriverCode code = pool->kind() == ShareKind::kFd ? driver_->export_fd(segment.memory, fd)
                                                         : driver_->export_fabric(segment.memory, &answer.handle);
  demand(*driver_, code, "cuMemExportToShareableHandle", question.device);
  return answer;
}

std::shared_ptr<PeerPool> DeviceRegistry::peer_pool(int device, const PoolOwner& owner) {
  const bool is_mine = owner.process == id_;
  const std::atomic<DevicePool*>* const mine = is_mine ? &made_pool(owner.device) : nullptr;
  MutexLock lock(mutex_);
  std::erase_if(peer_pools_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<PeerPool>& known = peer_pools_[{device, owner.process, owner.device}];
  if (auto pool = known.lock()) return pool;
  auto pool = is_mine ? local_pool(device, [mine] { return mine->load(std::memory_order_acquire); })
                      : remote_pool(driver_, device, owner);
  known = pool;
  return pool;
}

}  // namespace nvx
