#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/handle.h"

namespace nvx {

/// How one rank accesses memory of another one, best first.
enum class ShareKind : uint8_t {
  kFabric,   ///< virtual memory exported as a fabric handle: within an NVLink domain, which may span machines
  kFd,       ///< virtual memory exported as a file descriptor: within a host
  kIpc,      ///< a plain allocation exported as a legacy IPC handle: within a host
  kPointer,  ///< a plain allocation by its address: within a process
  kHost,     ///< pinned host memory that both map, if one device cannot access the other's memory
};
constexpr int kShareKinds = 5;
const char* name(ShareKind kind);

/// An address in unified addressing, of device or pinned host memory.
using DevicePtr = uint64_t;
/// Physical memory without an address.
using DeviceMemory = uint64_t;
/// A CUstream.
using DeviceStream = uint64_t;
/// 0 for success, otherwise the driver's error code.
using DriverCode = int;
/// A fabric handle or a legacy IPC handle.
using HandleBytes = std::array<uint8_t, 64>;

struct DeviceProperties {
  std::array<uint8_t, 16> uuid{};
  std::string name;
  std::string bus;  ///< "0000:3b:00.0"
  size_t bytes = 0;
  bool can[kShareKinds] = {};    ///< what the driver claims, by kind; only a trial proves it
  bool exports_dma_buf = false;  ///< its memory, so network cards could access it
  bool orders_rdma = false;      ///< kernels that run see what network cards have written, without a flush
  bool limits_kernels = false;   ///< the driver ends kernels that run for seconds, because it drives a display
  int architecture = 0;          ///< 90 for sm_90
  int cuda = 0;                  ///< the newest CUDA that the driver serves: 13000 for 13.0
};

/// The driver calls that nvx makes: of libcuda, or of a test's fake. Each returns the driver's error code. A resource
/// is returned with the call that follows its creation here. Calls may come from any thread, and may hang.
class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;

  /// The text of an error: "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  virtual std::string error_text(DriverCode code) const = 0;
  virtual DriverCode count(int* devices) = 0;
  virtual DriverCode describe(int device, DeviceProperties* properties) = 0;

  /// Virtual memory. Sizes and addresses are multiples of the granularity.
  virtual DriverCode granularity(int device, ShareKind kind, size_t* bytes) = 0;
  virtual DriverCode create(int device, ShareKind kind, size_t bytes, DeviceMemory* memory) = 0;
  virtual DriverCode release(DeviceMemory memory) = 0;
  virtual DriverCode reserve(size_t bytes, size_t alignment, DevicePtr* at) = 0;
  virtual DriverCode unreserve(DevicePtr at, size_t bytes) = 0;
  virtual DriverCode map(DevicePtr at, size_t bytes, DeviceMemory memory) = 0;
  virtual DriverCode unmap(DevicePtr at, size_t bytes) = 0;
  /// Lets one more device read and write this range of `owner`'s addresses. It needs no context on that device.
  virtual DriverCode allow(int owner, DevicePtr at, size_t bytes, int device) = 0;
  virtual DriverCode export_fd(DeviceMemory memory, Fd* fd) = 0;
  virtual DriverCode export_fabric(DeviceMemory memory, HandleBytes* handle) = 0;
  virtual DriverCode import_fd(int device, int fd, DeviceMemory* memory) = 0;
  virtual DriverCode import_fabric(int device, const HandleBytes& handle, DeviceMemory* memory) = 0;

  /// Multicast objects: memory of several devices, one part each, at one address, by which kernels store to all parts
  /// and reduce over them. They are exported, imported, mapped and released like virtual memory. All devices join
  /// before memory is bound or the object is mapped: until then these calls do not return.
  virtual DriverCode multicast_granularity(int device, ShareKind kind, int devices, size_t* bytes) = 0;
  virtual DriverCode create_multicast(int device, ShareKind kind, int devices, size_t bytes, DeviceMemory* object) = 0;
  virtual DriverCode join_multicast(DeviceMemory object, int device) = 0;
  /// Binds virtual memory of a device, from `offset` on, as the device's part.
  virtual DriverCode bind_multicast(DeviceMemory object, int device, DeviceMemory memory, size_t offset,
                                    size_t bytes) = 0;
  virtual DriverCode unbind_multicast(DeviceMemory object, int device, size_t bytes) = 0;

  virtual DriverCode allocate(int device, size_t bytes, DevicePtr* at) = 0;
  virtual DriverCode free(int device, DevicePtr at) = 0;
  virtual DriverCode export_ipc(int device, DevicePtr at, HandleBytes* handle) = 0;
  virtual DriverCode open_ipc(int device, const HandleBytes& handle, DevicePtr* at) = 0;
  virtual DriverCode close_ipc(int device, DevicePtr at) = 0;
  /// The start and size of the allocation that contains this address, of this process or opened from another.
  virtual DriverCode range(int device, DevicePtr at, DevicePtr* begin, size_t* bytes) = 0;

  /// Whether the driver reports peer access. Access may hang even if it does.
  virtual DriverCode can_reach(int device, int peer, bool* can) = 0;
  /// Lets one device access the other's plain allocations. Not an error if it already may.
  virtual DriverCode enable_peer(int device, int peer) = 0;

  /// Pinned host memory, accessible to all devices.
  virtual DriverCode pin(int device, void* memory, size_t bytes, DevicePtr* at) = 0;
  virtual DriverCode unpin(int device, void* memory) = 0;

  /// The stream's work begins before other work of the process that waits for room on the device.
  virtual DriverCode create_stream(int device, DeviceStream* stream) = 0;
  virtual DriverCode destroy_stream(int device, DeviceStream stream) = 0;
  /// copy() and fill() only enqueue work; drained() returns whether all enqueued work is complete.
  virtual DriverCode copy(int device, DeviceStream stream, DevicePtr to, DevicePtr from, size_t bytes) = 0;
  virtual DriverCode fill(int device, DeviceStream stream, DevicePtr to, uint8_t value, size_t bytes) = 0;
  virtual DriverCode drained(int device, DeviceStream stream, bool* done) = 0;
};

}  // namespace nvx
