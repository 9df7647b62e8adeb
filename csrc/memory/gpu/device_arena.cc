#include "memory/gpu/device_arena.h"

#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "base/round_up.h"
#include "memory/driver/driver_library.h"
#include "memory/gpu/device_work.h"

namespace nvx {

DeviceArena::DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes,
                         std::chrono::milliseconds timeout)
    : driver_(std::move(driver)),
      region_(DeviceRegion::make(driver_, device, kind, bytes)),
      timeout_(timeout),
      spans_(bytes - for_messages(bytes), kSpanPage, "the shared memory of GPU " + std::to_string(device), [](Span) {}),
      messages_(0, kSpanPage, "the slots of messages", [](Span) {}) {
  if (const size_t end = for_messages(bytes)) messages_.add({bytes - end, end});
}

DeviceArena::HostFallback& DeviceArena::open_fallback() {
  const std::string what =
      "pinning " + std::to_string(region_->bytes() >> 10) + " KiB for GPU " + std::to_string(region_->device());
  return fallback_.get(what, Deadline::after(timeout_),
                       [driver = driver_, device = region_->device(), bytes = region_->bytes()] {
                         auto fallback = std::make_unique<HostFallback>();
                         fallback->fd = make_host_fallback(bytes);
                         fallback->region = DeviceRegion::pin(driver, device, fallback->fd.get(), bytes);
                         return fallback;
                       });
}

Span DeviceArena::allocate(size_t bytes) {
  const Span span = spans_.allocate(bytes);
  const PairVerdict filled = work_now(
      driver_, region_->device(), {region_}, "filling",
      [at = at(span.offset), span](DeviceWork& work) { work.fill(at, 0, span.bytes); }, Deadline::after(timeout_));
  const std::string what = "nvx: GPU " + std::to_string(region_->device()) + " did not fill " +
                           std::to_string(span.bytes >> 10) + " KiB of its memory: " + filled.why;
  switch (filled.state) {
    case PairState::kFine: break;
    case PairState::kHung:
      quarantine(span);
      throw Error(Code::kTimeout, what, "check whether a hanging program uses the GPU");
    default: free(span); throw Error(Code::kSystem, what);
  }
  if (const HostFallback* fallback = fallback_.made())
    std::memset(fallback->region->host() + span.offset, 0, span.bytes);
  return span;
}

void DeviceArena::quarantine(Span span) {
  spans_.free_when(span, [] { return false; });
  region_->abandon();
  if (const HostFallback* fallback = fallback_.made()) fallback->region->abandon();
}

DeviceRegistry& DeviceRegistry::instance() {
  static DeviceRegistry* const kRegistry =
      new DeviceRegistry(driver_library());  // never destroyed: other processes may have it mapped
  return *kRegistry;
}

ShareProbe DeviceRegistry::probe(int device, std::chrono::milliseconds timeout) {
  ShareProbe before;
  {
    MutexLock lock(mutex_);
    before = probes_[device];
  }
  if (before.has(ShareKind::kHost) && made(device)) return before;
  ShareProbe now = probe_share_kinds(pinned_, device, {timeout_, timeout}, before);
  MutexLock lock(mutex_);
  now.hung |= probes_[device].hung;  // found by another group meanwhile
  return probes_[device] = std::move(now);
}

DeviceArena& DeviceRegistry::arena(int device, ShareKind kind) {
  CreatedOnce<DeviceArena>* arena = nullptr;
  {
    MutexLock lock(mutex_);
    arena = &arenas_[device];
  }
  const std::string what = "making " + std::to_string(arena_bytes_ >> 10) + " KiB of memory on GPU " +
                           std::to_string(device) + " (" + name(kind) + ")";
  return arena->get(what, Deadline::after(timeout_),
                    [driver = driver_, device, kind, bytes = arena_bytes_, timeout = timeout_] {
                      const size_t granule = share_granularity(*driver, device, kind);
                      return std::make_unique<DeviceArena>(driver, device, kind, round_up(bytes, granule), timeout);
                    });
}

DeviceArena* DeviceRegistry::made(int device) {
  MutexLock lock(mutex_);
  const auto it = arenas_.find(device);
  return it == arenas_.end() ? nullptr : it->second.made();
}

std::shared_ptr<DeviceRegion> DeviceRegistry::find(const Import& import) {
  MutexLock lock(mutex_);
  const auto it = imports_.find(import);
  return it == imports_.end() ? nullptr : it->second.lock();
}

void DeviceRegistry::adopt(const Import& import, const std::shared_ptr<DeviceRegion>& region) {
  MutexLock lock(mutex_);
  std::erase_if(imports_, [](const auto& entry) { return entry.second.expired(); });
  imports_[import] = region;
}

void DeviceRegistry::mark_unusable(const Import& import, const std::string& why,
                                   const std::shared_ptr<const void>& until_returned) {
  MutexLock lock(mutex_);
  Unusable& mark = unusable_[import];
  if (mark.until_returned) mark = {why, until_returned != nullptr, until_returned};
}

std::string DeviceRegistry::why_unusable(const Import& import) {
  MutexLock lock(mutex_);
  const auto it = unusable_.find(import);
  if (it == unusable_.end() || (it->second.until_returned && it->second.call.expired())) return "";
  return it->second.why;
}

// --- the pools of the devices, and their socket

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
  const ShareProbe found = probe(device, timeout_);
  const ShareKind kind = found.has(ShareKind::kFd) ? ShareKind::kFd : ShareKind::kFabric;
  if (!found.has(kind)) refuse_pool(device, found);
  DevicePool& made =
      here.making.get("making a pool on GPU " + std::to_string(device), Deadline::after(timeout_),
                      [this, driver = driver_, device, kind, timeout = timeout_] {
                        return std::make_unique<DevicePool>(
                            driver, device, DevicePool::Options{kind, timeout, [this] { open_pool_server(); }});
                      });
  here.made.store(&made, std::memory_order_release);
  return made;
}

/// Remembers the kinds that the device cannot do or did not return from, and does not request them again. The probe may
/// also have failed for lack of memory; that is logged once, and the next call tries again.
void DeviceRegistry::refuse_pool(int device, const ShareProbe& found) {
  const auto is_out = [&](ShareKind kind) {
    return !found.properties.can[int(kind)] || (found.hung >> int(kind) & 1) != 0;
  };
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
        pool_socket_, [this](const PoolRequest& request, Fd* fd) { return serve(request, fd); });
  } catch (const Error& error) {
    NVX_LOG(kWarn, "other processes cannot map this process's GPU pool, so its tensors are staged: %s",
            without_name(error.what()).c_str());
  }
}

PoolReply DeviceRegistry::serve(const PoolRequest& request, Fd* fd) {
  NVX_CHECK(request.process == id_, "the request is for another process");
  DevicePool* pool = nullptr;
  {
    MutexLock lock(mutex_);
    const auto found = pools_.find(request.device);
    if (found != pools_.end()) pool = found->second.made.load(std::memory_order_acquire);
  }
  const GrowingRegion::Segment segment = pool ? pool->region()->segment(request.segment) : GrowingRegion::Segment{};
  NVX_CHECK(segment.bytes > 0, "its pool has no such segment");
  PoolReply reply;
  reply.state = PoolReply::kHere;
  reply.kind = uint32_t(pool->kind());
  reply.pool = pool->id();
  reply.room = pool->region()->room();
  reply.offset = segment.offset;
  reply.bytes = segment.bytes;
  const DriverCode code = pool->kind() == ShareKind::kFd ? driver_->export_fd(segment.memory, fd)
                                                         : driver_->export_fabric(segment.memory, &reply.handle);
  check_driver(*driver_, code, "cuMemExportToShareableHandle", request.device);
  return reply;
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
