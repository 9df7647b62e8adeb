#include "memory/gpu/peer_pool.h"

#include <utility>

#include "base/error.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/growing_region.h"

namespace nvx {
namespace {

constexpr uint64_t kMostRoom = uint64_t(1) << 44;  // far beyond any device; a bound for values from peers

/// The pool of another process of this host, requested segment by segment through its socket.
class ForeignPool : public PeerPool {
 public:
  ForeignPool(std::shared_ptr<DeviceDriver> driver, int device, PoolOwner owner)
      : driver_(std::move(driver)), device_(device), owner_(std::move(owner)) {}

  DevicePtr base() const override { return base_.load(std::memory_order_acquire); }

 private:
  uint64_t map_next(uint64_t segment, const Deadline& deadline) override {
    const PoolRequest request{PoolRequest::kMagic, owner_.device, owner_.process, segment};
    Fd fd;
    const PoolReply reply = request_from_pool(owner_.socket, request, &fd, deadline);
    check(reply);
    if (!region_) {
      region_ = std::make_unique<GrowingRegion>(driver_, device_, reply.room);
      pool_ = reply.pool;
      base_.store(region_->base(), std::memory_order_release);
    }
    DeviceMemory memory = 0;
    const DriverCode code = ShareKind(reply.kind) == ShareKind::kFd
                                ? driver_->import_fd(device_, fd.get(), &memory)
                                : driver_->import_fabric(device_, reply.handle, &memory);
    check_driver(*driver_, code, "cuMemImportFromShareableHandle", device_);
    region_->append(memory, reply.bytes);
    return region_->mapped();
  }

  /// The reply comes from a peer, so check every field.
  void check(const PoolReply& reply) const {
    const uint64_t before = region_ ? region_->mapped() : 0;
    const bool virtual_memory = reply.kind == uint32_t(ShareKind::kFd) || reply.kind == uint32_t(ShareKind::kFabric);
    const bool same = !region_ || (reply.pool == pool_ && reply.room == region_->room());
    const bool inside = reply.room <= kMostRoom && reply.offset == before && reply.bytes > 0 && before <= reply.room &&
                        reply.bytes <= reply.room - before;
    const auto whole = [&](uint64_t granule) { return reply.bytes % granule == 0 && reply.room % granule == 0; };
    if (!virtual_memory || !same || !inside || !whole(share_granularity(*driver_, device_, ShareKind(reply.kind))))
      throw Error(Code::kMismatch, "nvx: it sent an invalid segment of its pool");
  }

  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const PoolOwner owner_;
  std::unique_ptr<GrowingRegion> region_;
  ArenaId pool_;
  std::atomic<DevicePtr> base_{0};
};

/// A pool of this process, at the owner's addresses.
class OwnPool : public PeerPool {
 public:
  OwnPool(int device, std::function<DevicePool*()> made) : device_(device), made_(std::move(made)) {}

  DevicePtr base() const override {
    const DevicePool* pool = made_();
    return pool ? pool->base() : 0;
  }

 private:
  uint64_t map_next(uint64_t segment, const Deadline&) override {
    DevicePool* const pool = made_();
    NVX_CHECK(pool && segment < pool->region()->segments(), "its pool has no such segment");
    const GrowingRegion::Segment next = pool->region()->segment(segment);
    pool->region()->allow_access(next, device_);
    return next.offset + next.bytes;
  }

  const int device_;
  const std::function<DevicePool*()> made_;
};

}  // namespace

void PeerPool::map_up_to(uint64_t grown, const Deadline& deadline) {
  MutexLock lock(mutex_);
  while (mapped() < grown) {
    const uint64_t reaches = map_next(segments_, deadline);
    ++segments_;
    mapped_.store(reaches, std::memory_order_release);
  }
}

void map_on_thread(const std::string& what, const std::shared_ptr<PeerPool>& pool, uint64_t grown,
                   const Deadline& deadline) {
  (void)call_or_throw<bool>(what, deadline, [pool, grown, deadline] {
    pool->map_up_to(grown, deadline);
    return true;
  });
}

std::shared_ptr<PeerPool> remote_pool(std::shared_ptr<DeviceDriver> driver, int device, const PoolOwner& owner) {
  return std::make_shared<ForeignPool>(std::move(driver), device, owner);
}

std::shared_ptr<PeerPool> local_pool(int device, std::function<DevicePool*()> made) {
  return std::make_shared<OwnPool>(device, std::move(made));
}

}  // namespace nvx
