#include "memory/gpu/pinned_memory.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/contain.h"
#include "base/round_up.h"
#include "memory/gpu/device_memory.h"

namespace nvx {
namespace {

/// Few sizes, so that spare memory is found again: at most a quarter, or 64 KiB, more than requested.
size_t size_class(size_t bytes) {
  constexpr size_t kLeast = 65536;
  return round_up(bytes, std::max(kLeast, std::bit_floor(bytes) / 4));
}

}  // namespace

PinnedMemory::PinnedMemory(std::shared_ptr<DeviceDriver> driver) : driver_(std::move(driver)) {}

PinnedMemory::~PinnedMemory() = default;

std::shared_ptr<DeviceRegion> PinnedMemory::get(int device, size_t bytes) {
  const size_t most = size_class(bytes);
  std::unique_ptr<DeviceRegion> region = take_spare(device, most);
  if (region) {
    std::memset(region->host(), 0, bytes);
  } else {
    region = DeviceRegion::pin(driver_, device, make_host_fallback(most).get(), most);
  }
  return {region.release(), [self = shared_from_this()](DeviceRegion* last) {
            contain("keeping pinned memory", [&] { self->put_back(std::unique_ptr<DeviceRegion>(last)); });
          }};
}

/// The smallest that is large enough, but none so large that small pieces, which groups hold, use up the large ones.
std::unique_ptr<DeviceRegion> PinnedMemory::take_spare(int device, size_t bytes) {
  MutexLock lock(mutex_);
  const auto found = spares_.lower_bound({device, bytes});
  if (found == spares_.end() || found->first > std::pair(device, 2 * bytes)) return nullptr;
  return std::move(spares_.extract(found).mapped());
}

void PinnedMemory::put_back(std::unique_ptr<DeviceRegion> region) {
  if (region->abandoned()) return;
  const std::pair key(region->device(), region->bytes());
  MutexLock lock(mutex_);
  spares_.emplace(key, std::move(region));
}

}  // namespace nvx
