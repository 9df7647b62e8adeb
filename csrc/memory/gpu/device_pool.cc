#include "memory/gpu/device_pool.h"

#include <unistd.h>

#include <utility>

#include "base/error.h"
#include "base/round_up.h"
#include "memory/driver/thread_call.h"

namespace nvx {

DevicePool::DevicePool(std::shared_ptr<DeviceDriver> driver, int device, Options options)
    : options_(std::move(options)),
      made_by_(getpid()),
      granule_(share_granularity(*driver, device, options_.kind)),
      region_(
          std::make_shared<GrowingRegion>(driver, device, round_up(properties_of(*driver, device).bytes, granule_))),
      spans_(0, kSpanPage, "the pool of GPU " + std::to_string(device), [](Span) {}) {}

DevicePtr DevicePool::allocate(size_t bytes) {
  NVX_CHECK(bytes > 0, "the size is 0");
  NVX_CHECK(bytes <= region_->room(),
            "GPU " + std::to_string(device()) + " has less memory than " + std::to_string(bytes >> 20) + " MiB");
  MutexLock lock(mutex_);
  // A forked child may also find the lock held for ever; the check helps if it does not.
  if (getpid() != made_by_) throw Error(Code::kInvalid, "nvx: a forked child process cannot use its parent's GPUs");
  Span span = spans_.find(bytes);
  if (!span) {
    grow(bytes);
    span = spans_.find(bytes);
  }
  const DevicePtr at = base() + span.offset;
  allocated_[at] = span;
  return at;
}

/// Grows by the requested size only: device memory is too scarce for a reserve.
void DevicePool::grow(uint64_t bytes) {
  const std::string what =
      "making " + std::to_string(bytes >> 10) + " KiB for the pool of GPU " + std::to_string(device());
  if (stuck_) throw Error(Code::kTimeout, "nvx: " + what + ": the driver has not returned from an earlier call");
  const uint64_t before = grown(), more = round_up(bytes, granule_);
  if (before == 0) options_.start_server();
  try {
    (void)call_or_throw<bool>(what, Deadline::after(options_.timeout), [region = region_, kind = options_.kind, more] {
      DeviceMemory memory = 0;
      check_driver(*region->driver(), region->driver()->create(region->device(), kind, more, &memory), "cuMemCreate",
                   region->device());
      region->append(memory, more);
      region->allow_peers(region->segment(region->segments() - 1));
      return true;
    });
  } catch (const Error& error) {
    stuck_ = error.code() == Code::kTimeout;
    throw;
  }
  spans_.add({before, more});
}

Span DevicePool::forget(DevicePtr at) {
  MutexLock lock(mutex_);
  const auto found = allocated_.extract(at);
  return found ? found.mapped() : Span{};
}

void DevicePool::free_when(DevicePtr at, std::function<bool()> released) {
  if (const Span span = forget(at)) spans_.free_when(span, std::move(released));
}

bool DevicePool::free(DevicePtr at) {
  const Span span = forget(at);
  if (span) spans_.free(span);
  return bool(span);
}

}  // namespace nvx
