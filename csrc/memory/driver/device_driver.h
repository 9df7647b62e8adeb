#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/handle.h"

namespace nvx {

/// How one rank reaches memory that another one has made, best first.
enum class ShareKind : uint8_t {
  kFabric,   ///< virtual memory, exported as a fabric handle: within an NVLink domain, which may span boxes
  kFd,       ///< virtual memory, exported as a file descriptor: within a host
  kIpc,      ///< a plain allocation, exported as a legacy IPC handle: within a host
  kPointer,  ///< a plain allocation, known by its address: within a process
  kHost,     ///< pinned host memory that both map: where one device cannot reach the other's
};
constexpr int kShareKinds = 5;
const char* name(ShareKind kind);

/// An address as devices see it. With unified addressing, which all of them have, host memory has one too.
using DevicePtr = uint64_t;
/// Physical memory that has no address yet.
using DeviceMemory = uint64_t;
/// Work in order.
using DeviceQueue = uint64_t;
/// 0 for done, else the driver's own number of its refusal.
using DriverCode = int;
/// A fabric handle, or a legacy IPC handle.
using HandleBytes = std::array<uint8_t, 64>;

struct DeviceFacts {
  std::array<uint8_t, 16> uuid{};
  std::string name;
  std::string bus;  ///< "0000:3b:00.0"
  size_t bytes = 0;
  bool can[kShareKinds] = {};  ///< what it says of itself, by kind; only trying tells
  bool exports_dma_buf = false;
};

/// The few calls that nvx asks of a device's driver: libcuda, or a test's. The code that each returns says whether it
/// was done. What a call gives must be given back by the call that follows it here. Calls may come from any thread, and
/// may hang.
class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;

  /// What a refusal means: "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  virtual std::string words(DriverCode code) const = 0;
  virtual DriverCode count(int* devices) = 0;
  virtual DriverCode describe(int device, DeviceFacts* facts) = 0;

  /// Virtual memory. Sizes and addresses are multiples of the granularity.
  virtual DriverCode granularity(int device, ShareKind kind, size_t* bytes) = 0;
  virtual DriverCode create(int device, ShareKind kind, size_t bytes, DeviceMemory* memory) = 0;
  virtual DriverCode release(DeviceMemory memory) = 0;
  virtual DriverCode reserve(size_t bytes, size_t alignment, DevicePtr* at) = 0;
  virtual DriverCode unreserve(DevicePtr at, size_t bytes) = 0;
  virtual DriverCode map(DevicePtr at, size_t bytes, DeviceMemory memory) = 0;
  virtual DriverCode unmap(DevicePtr at, size_t bytes) = 0;
  /// Lets a device read and write there, beside those that may already.
  virtual DriverCode allow(DevicePtr at, size_t bytes, int device) = 0;
  virtual DriverCode export_fd(DeviceMemory memory, Fd* fd) = 0;
  virtual DriverCode export_fabric(DeviceMemory memory, HandleBytes* handle) = 0;
  virtual DriverCode import_fd(int device, int fd, DeviceMemory* memory) = 0;
  virtual DriverCode import_fabric(int device, const HandleBytes& handle, DeviceMemory* memory) = 0;

  /// Plain allocations.
  virtual DriverCode allocate(int device, size_t bytes, DevicePtr* at) = 0;
  virtual DriverCode free(int device, DevicePtr at) = 0;
  virtual DriverCode export_ipc(int device, DevicePtr at, HandleBytes* handle) = 0;
  virtual DriverCode open_ipc(int device, const HandleBytes& handle, DevicePtr* at) = 0;
  virtual DriverCode close_ipc(int device, DevicePtr at) = 0;
  /// Where the allocation begins that this address is in, one of this process or one that was opened, and its size.
  virtual DriverCode range(int device, DevicePtr at, DevicePtr* begin, size_t* bytes) = 0;

  /// What the driver says. A pair that it says can reach each other may hang all the same.
  virtual DriverCode can_reach(int device, int peer, bool* can) = 0;
  /// Lets one device use the other's plain allocations; no error if it may already.
  virtual DriverCode enable_peer(int device, int peer) = 0;

  /// Host memory, for all devices.
  virtual DriverCode pin(int device, void* memory, size_t bytes, DevicePtr* at) = 0;
  virtual DriverCode unpin(int device, void* memory) = 0;

  virtual DriverCode open_queue(int device, DeviceQueue* queue) = 0;
  virtual DriverCode close_queue(int device, DeviceQueue queue) = 0;
  /// These begin the work only: drained() tells when all that was begun has been done.
  virtual DriverCode copy(int device, DeviceQueue queue, DevicePtr to, DevicePtr from, size_t bytes) = 0;
  virtual DriverCode fill(int device, DeviceQueue queue, DevicePtr to, uint8_t value, size_t bytes) = 0;
  virtual DriverCode drained(int device, DeviceQueue queue, bool* done) = 0;
};

}  // namespace nvx
