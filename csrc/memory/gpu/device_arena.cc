#include "memory/gpu/device_arena.h"

#include <cstring>

#include "base/error.h"
#include "memory/driver/driver_library.h"
#include "memory/gpu/device_work.h"

namespace nvx {
DeviceArena::DeviceArena(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes,
                         std::chrono::milliseconds patience)
    : driver_(std::move(driver)),
      region_(DeviceRegion::make(driver_, device, kind, bytes)),
      patience_(patience),
      spans_(bytes - for_messages(bytes), kSpanPage, "the shared memory of GPU " + std::to_string(device), [](Span) {}),
      messages_(0, kSpanPage, "the slots of messages", [](Span) {}) {
  if (const size_t end = for_messages(bytes)) messages_.add({bytes - end, end});
}

DeviceArena::HostFallback& DeviceArena::open_fallback() {
  const std::string what =
      "pinning " + std::to_string(region_->bytes() >> 10) + " KiB for GPU " + std::to_string(region_->device());
  return fallback_.get(what, Deadline::after(patience_),
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
      [at = at(span.offset), span](DeviceWork& work) { work.fill(at, 0, span.bytes); }, Deadline::after(patience_));
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

DeviceRegistry& DeviceRegistry::here() {
  static DeviceRegistry* const kRegistry =
      new DeviceRegistry(driver_library());  // never destroyed: other processes may have it mapped
  return *kRegistry;
}

ShareProbe DeviceRegistry::probe(int device, std::chrono::milliseconds patience) {
  ShareProbe before;
  {
    MutexLock lock(mutex_);
    before = probes_[device];
  }
  if (before.has(ShareKind::kHost) && made(device)) return before;
  ShareProbe now = probe_share_kinds(driver_, device, {patience_, patience}, before);
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
  return arena->get(
      what, Deadline::after(patience_), [driver = driver_, device, kind, bytes = arena_bytes_, patience = patience_] {
        const size_t granule = share_granularity(*driver, device, kind);
        return std::make_unique<DeviceArena>(driver, device, kind, (bytes + granule - 1) / granule * granule, patience);
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

void DeviceRegistry::distrust(const Import& import, const std::string& why) {
  MutexLock lock(mutex_);
  distrusted_[import] = why;
}

std::string DeviceRegistry::distrusted(const Import& import) {
  MutexLock lock(mutex_);
  const auto it = distrusted_.find(import);
  return it == distrusted_.end() ? "" : it->second;
}

}  // namespace nvx
