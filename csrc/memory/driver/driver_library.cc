#include "memory/driver/driver_library.h"

#include <map>
#include <optional>

#include "base/error.h"
#include "base/mutex.h"
#include "memory/driver/driver_abi.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

/// libcuda's functions. Each call runs in the primary context of its device, which torch uses too, and restores the
/// thread's current context. A retained primary context stays until the process ends.
class InContexts : public DeviceDriver {
 protected:
  explicit InContexts(const cuda::Api& api) : api_(api) {}

  int value(cuda::Device device, int attribute) const {
    int value = 0;
    return api_.cuDeviceGetAttribute(&value, attribute, device) == cuda::kSuccess ? value : 0;
  }
  bool has(cuda::Device device, int attribute) const { return value(device, attribute) != 0; }

  /// Of virtual memory. Where the device can, network cards may access it, as NCCL and UCX do with tensors of the pool.
  cuda::AllocationProperties properties(int device, ShareKind kind) const {
    cuda::Device handle = 0;
    cuda::AllocationProperties properties{};
    properties.type = cuda::kAllocationPinned;
    properties.handle_types = kind == ShareKind::kFabric ? cuda::kHandleFabric : cuda::kHandlePosixFd;
    properties.location = {cuda::kLocationDevice, device};
    properties.rdma_capable = api_.cuDeviceGet(&handle, device) == cuda::kSuccess && has(handle, cuda::kAttributeRdma);
    return properties;
  }

  /// Retains the primary context once. Callers for the same device wait meanwhile, as the driver may hang in it.
  DriverCode context(int device, cuda::Context* context) EXCLUDES(mutex_) {
    Primary& primary = primary_of(device);
    MutexLock lock(primary.mutex);
    if (!primary.context) {
      cuda::Device handle = 0;
      if (const DriverCode code = api_.cuDeviceGet(&handle, device)) return code;
      if (const DriverCode code = api_.cuDevicePrimaryCtxRetain(&primary.context, handle)) return code;
    }
    *context = primary.context;
    return cuda::kSuccess;
  }

  template <class Call>
  DriverCode in(int device, const Call& call)EXCLUDES(mutex_) {
    cuda::Context own = nullptr;
    if (const DriverCode code = context(device, &own)) return code;
    if (const DriverCode code = api_.cuCtxPushCurrent_v2(own)) return code;
    const DriverCode code = call();
    cuda::Context popped = nullptr;
    (void)api_.cuCtxPopCurrent_v2(&popped);
    return code;
  }

  DriverCode import(int device, void* handle, int type, DeviceMemory* memory) {
    return in(device, [&] { return api_.cuMemImportFromShareableHandle(memory, handle, type); });
  }

  static cuda::MulticastProperties multicast_properties(ShareKind kind, int devices, size_t bytes) {
    const int handles = kind == ShareKind::kFabric ? cuda::kHandleFabric : cuda::kHandlePosixFd;
    return {unsigned(devices), bytes, static_cast<unsigned long long>(handles), 0};
  }

  /// kNotSupported if the driver or the device has no multicast.
  template <class Call>
  DriverCode by_multicast(int device, const Call& call) EXCLUDES(mutex_) {
    cuda::Device handle = 0;
    if (const DriverCode code = api_.cuDeviceGet(&handle, device)) return code;
    std::optional<cuda::Multicast> api;
    if (has(handle, cuda::kAttributeMulticast)) {
      try {
        api.emplace(cuda::Multicast{api_.from});
      } catch (const Error&) {
      }
    }
    return api ? in(device, [&] { return call(*api, handle); }) : cuda::kNotSupported;
  }

  const cuda::Api api_;

 private:
  struct Primary {
    Mutex mutex;
    cuda::Context context GUARDED_BY(mutex) = nullptr;
  };
  Primary& primary_of(int device) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return primaries_[device];
  }

  Mutex mutex_;
  std::map<int, Primary> primaries_ GUARDED_BY(mutex_);  // entries are never removed
};

class DriverLibrary : public InContexts {
 public:
  explicit DriverLibrary(const cuda::Api& api) : InContexts(api) {}

  std::string error_text(DriverCode code) const override {
    const char *name = nullptr, *text = nullptr;
    if (api_.cuGetErrorName(code, &name) != cuda::kSuccess || !name) return "error " + std::to_string(code);
    if (api_.cuGetErrorString(code, &text) != cuda::kSuccess || !text) return name;
    return std::string(name) + " (" + text + ")";
  }

  DriverCode count(int* devices) override { return api_.cuDeviceGetCount(devices); }

  DriverCode describe(int device, DeviceProperties* properties) override {
    cuda::Device handle = 0;
    if (const DriverCode code = api_.cuDeviceGet(&handle, device)) return code;
    char name[128] = {}, bus[32] = {};
    if (const DriverCode code = api_.cuDeviceGetName(name, sizeof name, handle)) return code;
    if (const DriverCode code = api_.cuDeviceGetPCIBusId(bus, sizeof bus, handle)) return code;
    if (const DriverCode code = api_.cuDeviceGetUuid_v2(&properties->uuid, handle)) return code;
    if (const DriverCode code = api_.cuDeviceTotalMem_v2(&properties->bytes, handle)) return code;
    properties->name = name;
    properties->bus = bus;
    const bool mappable = has(handle, cuda::kAttributeVirtualMemory);
    properties->can[int(ShareKind::kFabric)] = mappable && has(handle, cuda::kAttributeFabric);
    properties->can[int(ShareKind::kFd)] = mappable && has(handle, cuda::kAttributePosixFd);
    properties->can[int(ShareKind::kIpc)] = true;
    properties->can[int(ShareKind::kPointer)] = true;
    properties->can[int(ShareKind::kHost)] = has(handle, cuda::kAttributeCanMapHost);
    properties->exports_dma_buf = has(handle, cuda::kAttributeDmaBuf);
    // Where NVLink-C2C joins GPU and CPU, the host's flags may overtake what cards write to the GPU over PCIe.
    properties->orders_rdma = value(handle, cuda::kAttributeRdmaOrdering) >= cuda::kRdmaOrderedForOwner &&
                              !has(handle, cuda::kAttributeHostPageTables);
    properties->limits_kernels = has(handle, cuda::kAttributeKernelTimeLimit);
    properties->architecture = 10 * value(handle, cuda::kAttributeMajor) + value(handle, cuda::kAttributeMinor);
    return api_.cuDriverGetVersion(&properties->cuda);
  }

  DriverCode granularity(int device, ShareKind kind, size_t* bytes) override {
    const cuda::AllocationProperties wanted = properties(device, kind);
    return in(device, [&] { return api_.cuMemGetAllocationGranularity(bytes, &wanted, cuda::kGranularityMinimum); });
  }
  DriverCode create(int device, ShareKind kind, size_t bytes, DeviceMemory* memory) override {
    const cuda::AllocationProperties wanted = properties(device, kind);
    return in(device, [&] { return api_.cuMemCreate(memory, bytes, &wanted, 0); });
  }
  DriverCode release(DeviceMemory memory) override { return api_.cuMemRelease(memory); }
  DriverCode reserve(size_t bytes, size_t alignment, DevicePtr* at) override {
    return api_.cuMemAddressReserve(at, bytes, alignment, 0, 0);
  }
  DriverCode unreserve(DevicePtr at, size_t bytes) override { return api_.cuMemAddressFree(at, bytes); }
  DriverCode map(DevicePtr at, size_t bytes, DeviceMemory memory) override {
    return api_.cuMemMap(at, bytes, 0, memory, 0);
  }
  DriverCode unmap(DevicePtr at, size_t bytes) override { return api_.cuMemUnmap(at, bytes); }
  DriverCode allow(int owner, DevicePtr at, size_t bytes, int device) override {
    const cuda::Access access{{cuda::kLocationDevice, device}, cuda::kAccessReadWrite};
    return in(owner, [&] { return api_.cuMemSetAccess(at, bytes, &access, 1); });
  }
  DriverCode export_fd(DeviceMemory memory, Fd* fd) override {
    int number = -1;
    const DriverCode code = api_.cuMemExportToShareableHandle(&number, memory, cuda::kHandlePosixFd, 0);
    if (code == cuda::kSuccess) *fd = Fd(number);
    return code;
  }
  DriverCode export_fabric(DeviceMemory memory, HandleBytes* handle) override {
    return api_.cuMemExportToShareableHandle(handle->data(), memory, cuda::kHandleFabric, 0);
  }
  DriverCode import_fd(int device, int fd, DeviceMemory* memory) override {
    // For this kind, the descriptor itself is passed in place of the address.
    return import(device, reinterpret_cast<void*>(intptr_t(fd)), cuda::kHandlePosixFd, memory);
  }
  DriverCode import_fabric(int device, const HandleBytes& handle, DeviceMemory* memory) override {
    HandleBytes copy = handle;
    return import(device, copy.data(), cuda::kHandleFabric, memory);
  }

  DriverCode multicast_granularity(int device, ShareKind kind, int devices, size_t* bytes) override {
    const cuda::MulticastProperties wanted = multicast_properties(kind, devices, 0);
    return by_multicast(device, [&](const cuda::Multicast& api, cuda::Device) {
      return api.cuMulticastGetGranularity(bytes, &wanted, cuda::kGranularityMinimum);
    });
  }
  DriverCode create_multicast(int device, ShareKind kind, int devices, size_t bytes, DeviceMemory* object) override {
    const cuda::MulticastProperties wanted = multicast_properties(kind, devices, bytes);
    return by_multicast(
        device, [&](const cuda::Multicast& api, cuda::Device) { return api.cuMulticastCreate(object, &wanted); });
  }
  DriverCode join_multicast(DeviceMemory object, int device) override {
    return by_multicast(
        device, [&](const cuda::Multicast& api, cuda::Device own) { return api.cuMulticastAddDevice(object, own); });
  }
  DriverCode bind_multicast(DeviceMemory object, int device, DeviceMemory memory, size_t offset,
                            size_t bytes) override {
    return by_multicast(device, [&](const cuda::Multicast& api, cuda::Device) {
      return api.cuMulticastBindMem(object, 0, memory, offset, bytes, 0);
    });
  }
  DriverCode unbind_multicast(DeviceMemory object, int device, size_t bytes) override {
    return by_multicast(device, [&](const cuda::Multicast& api, cuda::Device own) {
      return api.cuMulticastUnbind(object, own, 0, bytes);
    });
  }

  DriverCode allocate(int device, size_t bytes, DevicePtr* at) override {
    return in(device, [&] { return api_.cuMemAlloc_v2(at, bytes); });
  }
  DriverCode free(int device, DevicePtr at) override {
    return in(device, [&] { return api_.cuMemFree_v2(at); });
  }
  DriverCode export_ipc(int device, DevicePtr at, HandleBytes* handle) override {
    return in(device, [&] { return api_.cuIpcGetMemHandle(handle, at); });
  }
  DriverCode open_ipc(int device, const HandleBytes& handle, DevicePtr* at) override {
    return in(device, [&] { return api_.cuIpcOpenMemHandle_v2(at, handle, cuda::kIpcLazyPeerAccess); });
  }
  DriverCode close_ipc(int device, DevicePtr at) override {
    return in(device, [&] { return api_.cuIpcCloseMemHandle(at); });
  }
  DriverCode range(int device, DevicePtr at, DevicePtr* begin, size_t* bytes) override {
    return in(device, [&] { return api_.cuMemGetAddressRange_v2(begin, bytes, at); });
  }

  DriverCode can_reach(int device, int peer, bool* can) override {
    int answer = 0;
    const DriverCode code = api_.cuDeviceCanAccessPeer(&answer, device, peer);
    *can = answer != 0;
    return code;
  }
  DriverCode enable_peer(int device, int peer) override {
    cuda::Context other = nullptr;
    if (const DriverCode code = context(peer, &other)) return code;
    const DriverCode code = in(device, [&] { return api_.cuCtxEnablePeerAccess(other, 0); });
    return code == cuda::kPeerAccessAlreadyEnabled ? cuda::kSuccess : code;
  }

  DriverCode pin(int device, void* memory, size_t bytes, DevicePtr* at) override {
    return in(device, [&] {
      constexpr unsigned kFlags = cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap;
      if (const DriverCode code = api_.cuMemHostRegister_v2(memory, bytes, kFlags)) return code;
      const DriverCode code = api_.cuMemHostGetDevicePointer_v2(at, memory, 0);
      if (code) (void)api_.cuMemHostUnregister(memory);
      return code;
    });
  }
  DriverCode unpin(int device, void* memory) override {
    return in(device, [&] { return api_.cuMemHostUnregister(memory); });
  }

  DriverCode create_stream(int device, DeviceStream* stream) override {
    cuda::Stream created = nullptr;
    const DriverCode code =
        in(device, [&] { return api_.cuStreamCreateWithPriority(&created, cuda::kStreamNonBlocking, cuda::kFirst); });
    *stream = reinterpret_cast<DeviceStream>(created);
    return code;
  }
  DriverCode destroy_stream(int device, DeviceStream stream) override {
    return in(device, [&] { return api_.cuStreamDestroy_v2(native(stream)); });
  }
  DriverCode copy(int device, DeviceStream stream, DevicePtr to, DevicePtr from, size_t bytes) override {
    return in(device, [&] { return api_.cuMemcpyAsync(to, from, bytes, native(stream)); });
  }
  DriverCode fill(int device, DeviceStream stream, DevicePtr to, uint8_t value, size_t bytes) override {
    return in(device, [&] { return api_.cuMemsetD8Async(to, value, bytes, native(stream)); });
  }
  DriverCode drained(int device, DeviceStream stream, bool* done) override {
    const DriverCode code = in(device, [&] { return api_.cuStreamQuery(native(stream)); });
    *done = code == cuda::kSuccess;
    return code == cuda::kNotReady ? cuda::kSuccess : code;
  }

 private:
  static cuda::Stream native(DeviceStream stream) { return reinterpret_cast<cuda::Stream>(stream); }
};

}  // namespace

std::shared_ptr<DeviceDriver> driver_library(const char* path, std::chrono::milliseconds timeout) {
  const Library library(path ? path : "libcuda.so.1", "the driver is older than nvx needs (R530)");
  if (!library) {
    throw Error(Code::kSystem, "nvx: no NVIDIA driver here (" + library.error() + ")",
                "in a container, start it with --gpus all");
  }
  const cuda::Api api{{library}};
  auto driver = std::make_shared<DriverLibrary>(api);
  const DriverCode code = call_or_throw<DriverCode>("cuInit of the NVIDIA driver", Deadline::after(timeout),
                                                    [start = api.cuInit] { return start(0); });
  if (code) throw Error(Code::kSystem, "nvx: the NVIDIA driver cannot be used: " + driver->error_text(code));
  return driver;
}

std::vector<DeviceProperties> device_properties(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline) {
  const auto query = [driver] {
    std::vector<DeviceProperties> found;
    const auto done = [&](DriverCode code, const char* call) {
      if (code) throw Error(Code::kSystem, std::string("nvx: ") + call + ": " + driver->error_text(code));
    };
    int count = 0;
    done(driver->count(&count), "cuDeviceGetCount");
    for (int device = 0; device < count; ++device) {
      done(driver->describe(device, &found.emplace_back()), "cuDeviceGetAttribute");
    }
    return found;
  };
  return call_or_throw<std::vector<DeviceProperties>>("the query of the GPUs", deadline, query);
}

}  // namespace nvx
