#include "memory/gpu/device_multicast.h"

#include <algorithm>
#include <string>

#include "base/contain.h"
#include "base/error.h"
#include "base/per_process.h"
#include "base/round_up.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/mapping_setup.h"

namespace nvx {

/// One process's end of a multicast object. The destructor returns what it acquired; the driver may hang in that.
class MulticastObject {
 public:
  /// `get` returns the object; it is the driver's `call`. Throws Error, as do all functions here.
  MulticastObject(std::shared_ptr<DeviceDriver> driver, int device, size_t bytes, const char* call,
                  const std::function<DriverCode(DeviceMemory*)>& get)
      : driver_(std::move(driver)), device_(device), bytes_(bytes) {
    check(get(&object_), call);
    own_memory(*driver_, object_, undo_);  // `undo_` is destroyed before `driver_`
  }

  Fd export_fd() const {
    Fd fd;
    check(driver_->export_fd(object_, &fd), "cuMemExportToShareableHandle");
    return fd;
  }
  HandleBytes export_fabric() const {
    HandleBytes handle{};
    check(driver_->export_fabric(object_, &handle), "cuMemExportToShareableHandle");
    return handle;
  }
  /// Adds the device. Call it on all ranks before bind() on any: bind() waits for all devices.
  void join() { check(driver_->join_multicast(object_, device_), "cuMulticastAddDevice"); }
  /// Addresses of an object are multiples of its granularity, which may be larger than that of memory.
  void bind(const std::shared_ptr<DeviceRegion>& region, size_t offset, size_t granularity) {
    DeviceDriver* const driver = driver_.get();
    const size_t bytes = bytes_;
    check(driver->bind_multicast(object_, device_, region->memory(), offset, bytes), "cuMulticastBindMem");
    undo_.add([driver, region, object = object_, device = device_, bytes] {
      log_failed_call(*driver, driver->unbind_multicast(object, device, bytes), "cuMulticastUnbind");
    });
    base_ = reserve(*driver, device_, bytes, undo_, granularity);
    map(*driver, device_, base_, bytes, object_, undo_);
  }

  DevicePtr base() const { return base_; }
  size_t bytes() const { return bytes_; }

 private:
  void check(DriverCode code, const char* call) const { check_driver(*driver_, code, call, device_); }

  const std::shared_ptr<DeviceDriver> driver_;
  const int device_;
  const size_t bytes_;
  DeviceMemory object_ = 0;
  DevicePtr base_ = 0;
  Undo undo_;
};

namespace {

/// The end of a rank's step. Fixed layout; comes from peers.
struct MulticastInfo {
  static constexpr uint32_t kMagic = 0x6d78766e;  // "nvxm"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  uint64_t granularity = 0;
  HandleBytes handle{};
  char why_not[160] = {};  // empty: the step succeeded
};
static_assert(sizeof(MulticastInfo) == 16 + 64 + 160);

/// Does not wait for the driver.
void release(std::shared_ptr<MulticastObject> object) {
  contain("releasing a multicast object",
          [&] { const ThreadCall<bool> call([last = std::move(object)]() mutable { return last.reset(), true; }); });
}

}  // namespace

DevicePtr MulticastSpan::all() const { return object_->base(); }
size_t MulticastSpan::bytes() const { return object_->bytes(); }

void MulticastSpan::release_when(std::function<bool()> gone) {
  if (!span_) return;
  const auto object = std::make_shared<std::shared_ptr<MulticastObject>>(std::move(object_));
  arena_.free_when(std::exchange(span_, Span{}), [object, gone = std::move(gone)] {
    if (!gone()) return false;
    release(std::move(*object));
    return true;
  });
}

void MulticastSpan::keep() {
  if (!span_) return;
  keep_until_exit(std::move(object_));
  arena_.quarantine(std::exchange(span_, Span{}));
}

/// The steps in which all ranks make an object, and what this rank holds of it until it is done.
class MappingSetup::Steps {
 public:
  explicit Steps(MappingSetup& setup) : setup_(setup) {}
  ~Steps() {
    DeviceArena* const arena = setup_.mappings_.arena_;
    if (!hung_) release(std::move(*object));
    if (span) hung_ ? arena->quarantine(span) : arena->free(span);
  }
  Steps(const Steps&) = delete;

  /// Performs `own` on a thread, within the deadline, and then `then` on this one. Returns whether all ranks have
  /// succeeded; if not, `why_no_multicast()` has the reason of the first one that has not.
  bool all(
      const char* what, const std::function<MulticastInfo()>& own, const std::function<void()>& then = [] {}) {
    const MappingOptions& options = setup_.options_;
    MulticastInfo info;
    try {
      info = call_or_throw<MulticastInfo>(what, Deadline::after(options.timeout), own);
      then();
    } catch (const Error& error) {
      hung_ = error.code() == Code::kTimeout;
      put(info.why_not, error.reason());
    }
    info.rank = options.rank;
    infos_ = read_infos<MulticastInfo>(setup_.bootstrap_.all_gather(bytes_of(info)), options.name);
    for (size_t r = 0; r < infos_.size(); ++r) {
      const std::string why_not = text_of(infos_[r].why_not);
      if (why_not.empty()) continue;
      setup_.mappings_.why_no_multicast_ = options.name(int(r)) + ": " + why_not;
      return false;
    }
    return true;
  }
  const std::vector<MulticastInfo>& infos() const { return infos_; }
  std::unique_ptr<MulticastSpan> done(size_t offset) {
    return std::make_unique<MulticastSpan>(*setup_.mappings_.arena_, std::exchange(span, Span{}), offset,
                                           std::move(*object));
  }

  /// A step that hangs owns it too, and destroys it when it returns.
  const std::shared_ptr<std::shared_ptr<MulticastObject>> object = std::make_shared<std::shared_ptr<MulticastObject>>();
  Span span;

 private:
  MappingSetup& setup_;
  std::vector<MulticastInfo> infos_;
  bool hung_ = false;  // this rank's step has not returned, so the driver may still complete it
};

/// By facts that all ranks share; empty if the group may have an object.
std::string MappingSetup::why_no_multicast() const {
  const ShareKind kind = mappings_.agreement_.kind;
  if (kind != ShareKind::kFabric && kind != ShareKind::kFd)
    return std::string("the ranks do not share virtual memory, but memory by ") + name(kind);
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = a + 1; b < ranks(); ++b) {
      const std::string both = options_.name(int(a)) + " and " + options_.name(int(b));
      if (infos_[a].process == infos_[b].process) return both + " are one process";
      if (infos_[a].uuid == infos_[b].uuid) return both + " share a GPU";
      if (!pairs_[a * ranks() + b].fine()) return both + " do not reach each other's GPU memory";
    }
  }
  return "";
}

/// Rank 0 creates the object, all ranks join it, and then all bind a part of their arenas. A rank that fails or hangs
/// in a step reports it at its end, so no rank begins a step that would wait for it.
void MappingSetup::share_multicast() {
  if (options_.multicast_bytes == 0) return;
  mappings_.why_no_multicast_ = why_no_multicast();
  if (!mappings_.why_no_multicast_.empty()) return;
  const bool first = me() == 0, by_fd = mappings_.agreement_.kind == ShareKind::kFd;
  Steps steps(*this);
  const auto request = [driver = registry_.driver(), device = options_.device, ranks = options_.ranks,
                        kind = mappings_.agreement_.kind] {
    MulticastInfo info;
    check_driver(*driver, driver->multicast_granularity(device, kind, ranks, &info.granularity),
                 "cuMulticastGetGranularity", device);
    return info;
  };
  if (!steps.all("requesting multicast", request)) return;
  constexpr uint64_t kMost = uint64_t(1) << 30;
  uint64_t granularity = 1;
  for (const MulticastInfo& info : steps.infos()) granularity = std::max(granularity, info.granularity);
  if (granularity > kMost || (granularity & (granularity - 1)) != 0)
    throw Error(Code::kMismatch, "nvx: a rank sent an invalid description of its multicast memory");
  const size_t bytes = round_up(options_.multicast_bytes, granularity);

  const auto fd = std::make_shared<Fd>();
  const auto create = [=, object = steps.object, driver = registry_.driver(), device = options_.device,
                       ranks = options_.ranks, kind = mappings_.agreement_.kind] {
    MulticastInfo info;
    if (!first) return info;
    *object = std::make_shared<MulticastObject>(driver, device, bytes, "cuMulticastCreate", [&](DeviceMemory* made) {
      return driver->create_multicast(device, kind, ranks, bytes, made);
    });
    if (by_fd) *fd = (*object)->export_fd();
    if (!by_fd) info.handle = (*object)->export_fabric();
    return info;
  };
  std::vector<bool> others(ranks(), true), sender(ranks(), false);
  others[0] = false, sender[0] = by_fd && !first;
  ++turn_;
  const auto send = [&] {
    if (by_fd && first) send_fd(fd->get(), others);
  };
  if (!steps.all("creating a multicast object", create, send)) return;
  if (!first && by_fd) *fd = std::move(collect(sender)[0]);
  const auto join = [=, object = steps.object, driver = registry_.driver(), device = options_.device,
                     handle = steps.infos()[0].handle] {
    NVX_CHECK(first || !by_fd || *fd, "the multicast object of rank 0 did not arrive");
    const auto import = [&](DeviceMemory* made) {
      return by_fd ? driver->import_fd(device, fd->get(), made) : driver->import_fabric(device, handle, made);
    };
    if (!first)
      *object = std::make_shared<MulticastObject>(driver, device, bytes, "cuMemImportFromShareableHandle", import);
    (*object)->join();
    return MulticastInfo();
  };
  if (!steps.all("joining a multicast object", join)) return;

  std::string full;
  try {
    steps.span = mappings_.arena_->allocate(bytes + granularity);
  } catch (const Error& error) {
    full = error.reason();
  }
  const size_t offset = round_up(steps.span.offset, granularity);
  const auto bind = [=, object = steps.object, region = mappings_.arena_->hold()] {
    if (!full.empty()) throw Error(Code::kSystem, full);
    (*object)->bind(region, offset, granularity);
    return MulticastInfo();
  };
  if (!steps.all("binding memory to a multicast object", bind)) return;
  mappings_.multicast_ = steps.done(offset);
}

}  // namespace nvx
