#include "memory/gpu/device_memory.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/per_process.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_work.h"
#include "memory/shm/arena.h"

namespace nvx {
namespace {

bool is_virtual(ShareKind kind) { return kind == ShareKind::kFabric || kind == ShareKind::kFd; }

constexpr const char* kImport = "cuMemImportFromShareableHandle";

}  // namespace

const char* name(ShareKind kind) {
  constexpr const char* kNames[kShareKinds] = {"fabric handle", "file descriptor", "legacy IPC", "pointer",
                                               "pinned host memory"};
  return kNames[int(kind)];
}

void check_driver(const DeviceDriver& driver, DriverCode code, const std::string& call, int device) {
  if (code)
    throw Error(Code::kSystem, "nvx: " + call + " on GPU " + std::to_string(device) + ": " + driver.error_text(code));
}

void log_failed_call(const DeviceDriver& driver, DriverCode code, const char* call) {
  if (code) NVX_LOG(kWarn, "%s failed: %s", call, driver.error_text(code).c_str());
}

void check_peer_access(DeviceDriver& driver, int device, int peer) {
  bool can = device == peer;
  if (!can) check_driver(driver, driver.can_reach(device, peer, &can), "cuDeviceCanAccessPeer", device);
  NVX_CHECK(can,
            "the driver reports that GPU " + std::to_string(device) + " cannot access GPU " + std::to_string(peer));
}

DeviceProperties properties_of(DeviceDriver& driver, int device) {
  DeviceProperties properties;
  check_driver(driver, driver.describe(device, &properties), "cuDeviceGetAttribute", device);
  return properties;
}

void own_memory(DeviceDriver& driver, DeviceMemory memory, Undo& undo) {
  undo.add([&driver, memory] { log_failed_call(driver, driver.release(memory), "cuMemRelease"); });
}

DevicePtr reserve(DeviceDriver& driver, int device, size_t bytes, Undo& undo, size_t alignment) {
  DevicePtr at = 0;
  check_driver(driver, driver.reserve(bytes, alignment, &at), "cuMemAddressReserve", device);
  undo.add([&driver, at, bytes] { log_failed_call(driver, driver.unreserve(at, bytes), "cuMemAddressFree"); });
  return at;
}

void map(DeviceDriver& driver, int device, DevicePtr at, size_t bytes, DeviceMemory memory, Undo& undo) {
  check_driver(driver, driver.map(at, bytes, memory), "cuMemMap of " + std::to_string(bytes) + " bytes", device);
  undo.add([&driver, at, bytes] { log_failed_call(driver, driver.unmap(at, bytes), "cuMemUnmap"); });
  check_driver(driver, driver.allow(device, at, bytes, device), "cuMemSetAccess", device);
}

void Undo::forget() {
  for (auto& step : steps_) keep_until_exit(std::move(step));  // with everything that they own
  steps_.clear();
}

void Undo::all() {
  while (!steps_.empty()) {
    const auto step = std::move(steps_.back());
    steps_.pop_back();
    step();
  }
}

/// Takes ownership of the physical memory that the call has given, and maps it where this device may access it.
void DeviceRegion::map_memory(DriverCode code, const char* call) {
  check(code, call);
  own_memory(*driver_, memory_, undo_);  // `undo_` is destroyed before `driver_`
  base_ = reserve(*driver_, device_, bytes_, undo_);
  map(*driver_, device_, base_, bytes_, memory_, undo_);
}

/// A handle of a plain allocation does not contain its size.
void DeviceRegion::check_size() const {
  DevicePtr start = 0;
  size_t bytes = 0;
  check(driver_->range(device_, base_, &start, &bytes), "cuMemGetAddressRange");
  const bool inside = start <= base_ && base_ - start <= bytes;
  const size_t room = inside ? bytes - (base_ - start) : 0;
  NVX_CHECK(room >= bytes_, "it has " + std::to_string(room) + " bytes instead of the " + std::to_string(bytes_) +
                                " that were offered");
}

std::unique_ptr<DeviceRegion> DeviceRegion::make(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                                 size_t bytes) {
  DeviceDriver* const raw = driver.get();
  std::unique_ptr<DeviceRegion> region(new DeviceRegion(std::move(driver), device, kind, bytes));
  if (is_virtual(kind)) {
    region->map_memory(raw->create(device, kind, bytes, &region->memory_), "cuMemCreate");
    return region;
  }
  region->check(raw->allocate(device, bytes, &region->base_), "cuMemAlloc");
  region->undo_.add([raw, device, at = region->base_] { log_failed_call(*raw, raw->free(device, at), "cuMemFree"); });
  return region;
}

std::unique_ptr<DeviceRegion> DeviceRegion::import_fd(std::shared_ptr<DeviceDriver> driver, int device, int fd,
                                                      size_t bytes) {
  DeviceDriver* const raw = driver.get();
  std::unique_ptr<DeviceRegion> region(new DeviceRegion(std::move(driver), device, ShareKind::kFd, bytes));
  region->map_memory(raw->import_fd(device, fd, &region->memory_), kImport);
  return region;
}

std::unique_ptr<DeviceRegion> DeviceRegion::import_handle(std::shared_ptr<DeviceDriver> driver, int device,
                                                          ShareKind kind, const HandleBytes& handle, size_t bytes) {
  DeviceDriver* const raw = driver.get();
  std::unique_ptr<DeviceRegion> region(new DeviceRegion(std::move(driver), device, kind, bytes));
  if (is_virtual(kind)) {
    region->map_memory(raw->import_fabric(device, handle, &region->memory_), kImport);
    return region;
  }
  region->check(raw->open_ipc(device, handle, &region->base_), "cuIpcOpenMemHandle");
  region->undo_.add(
      [raw, device, at = region->base_] { log_failed_call(*raw, raw->close_ipc(device, at), "cuIpcCloseMemHandle"); });
  region->check_size();
  return region;
}

std::unique_ptr<DeviceRegion> DeviceRegion::pin(std::shared_ptr<DeviceDriver> driver, int device, int memfd,
                                                size_t bytes) {
  NVX_CHECK(sealed_bytes(memfd) == bytes, "the descriptor from another process is not pinned host memory of nvx");
  DeviceDriver* const raw = driver.get();
  std::unique_ptr<DeviceRegion> region(new DeviceRegion(std::move(driver), device, ShareKind::kHost, bytes));
  const auto mapping = std::make_shared<Mapping>(memfd, bytes);
  region->undo_.add([mapping] {});
  std::byte* const base = mapping->base();
  region->host_ = base;
  region->check(raw->pin(device, base, bytes, &region->base_), "cuMemHostRegister");
  region->undo_.add([raw, device, base] { log_failed_call(*raw, raw->unpin(device, base), "cuMemHostUnregister"); });
  return region;
}

Fd DeviceRegion::export_fd() const {
  Fd fd;
  check(driver_->export_fd(memory_, &fd), "cuMemExportToShareableHandle");
  return fd;
}

HandleBytes DeviceRegion::export_handle() const {
  HandleBytes handle{};
  if (kind_ == ShareKind::kFabric) {
    check(driver_->export_fabric(memory_, &handle), "cuMemExportToShareableHandle");
  } else {
    check(driver_->export_ipc(device_, base_, &handle), "cuIpcGetMemHandle");
  }
  return handle;
}

void DeviceRegion::allow_access(int device) const {
  if (device == device_) return;
  if (is_virtual(kind_)) {
    check_driver(*driver_, driver_->allow(device_, base_, bytes_, device), "cuMemSetAccess", device);
  } else {
    check_driver(*driver_, driver_->enable_peer(device, device_), "cuCtxEnablePeerAccess", device);
  }
}

size_t share_granularity(DeviceDriver& driver, int device, ShareKind kind) {
  constexpr size_t kPlain = size_t(2) << 20;
  if (!is_virtual(kind)) return kPlain;
  size_t bytes = 0;
  check_driver(driver, driver.granularity(device, kind, &bytes), "cuMemGetAllocationGranularity", device);
  return std::max(bytes, kPlain);
}

/// Exports a region and imports it again, like a peer. A driver can create handles that this process may not open, such
/// as fabric handles without an IMEX channel. Throws Error if it refuses.
static void share_with_itself(const std::shared_ptr<DeviceDriver>& driver, const DeviceRegion& region) {
  switch (region.kind()) {
    case ShareKind::kFd:
      (void)DeviceRegion::import_fd(driver, region.device(), region.export_fd().get(), region.bytes());
      break;
    case ShareKind::kFabric:
      (void)DeviceRegion::import_handle(driver, region.device(), region.kind(), region.export_handle(), region.bytes());
      break;
    default: (void)region.export_handle();  // a process cannot open its own legacy IPC handles
  }
}

ShareProbe probe_share_kinds(const std::shared_ptr<PinnedMemory>& pinned, int device, const ProbeTimes& times,
                             const ShareProbe& before) {
  const std::shared_ptr<DeviceDriver>& driver = pinned->driver();
  ShareProbe probe;
  const auto attempt = [&](ShareKind kind, std::chrono::milliseconds span,
                           const std::function<DeviceProperties()>& how) {
    const uint32_t bit = 1u << int(kind);
    std::string& why = probe.why_not[int(kind)];
    if (before.hung & bit) {
      probe.hung |= bit;
      why = before.why_not[int(kind)];
      return;
    }
    try {
      probe.properties = call_or_throw<DeviceProperties>("the driver's call", Deadline::after(span), how);
      probe.kinds |= bit;
    } catch (const Error& error) {
      if (error.code() == Code::kTimeout) probe.hung |= bit;
      why = error.reason();
    }
  };
  attempt(ShareKind::kPointer, times.device, [driver, device] {
    const DeviceWork none(driver, device, {});
    return properties_of(*driver, device);
  });
  if (!probe.has(ShareKind::kPointer)) {
    for (std::string& why : probe.why_not) why = probe.why_not[int(ShareKind::kPointer)];
    return probe;
  }
  const DeviceProperties properties = probe.properties;
  for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}) {
    attempt(kind, times.kind, [driver, device, kind, properties] {
      NVX_CHECK(properties.can[int(kind)], "GPU " + std::to_string(device) + " does not support it");
      share_with_itself(driver, *DeviceRegion::make(driver, device, kind, share_granularity(*driver, device, kind)));
      return properties;
    });
  }
  attempt(ShareKind::kHost, times.kind, [pinned, device, properties] {
    (void)pinned->get(device, kCheckBytes);
    return properties;
  });
  return probe;
}

MappedRegions::~MappedRegions() {
  if (!regions_.empty()) destroy_on_thread("unmapping other ranks' GPU memory", std::move(regions_), timeout_);
}

}  // namespace nvx
