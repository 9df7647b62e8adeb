#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/library.h"

/// The functions of libcuda.so.1 that nvx calls, declared here so that no CUDA header is needed to build. If there is
/// one, a test compares the declarations with it.
namespace nvx::cuda {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Pointer = uint64_t;
using Allocation = uint64_t;
using Uuid = std::array<uint8_t, 16>;
using IpcHandle = std::array<uint8_t, 64>;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr int kCaptureModeRelaxed = 2;
constexpr Result kPeerAccessAlreadyEnabled = 704;

constexpr int kAttributeCanMapHost = 19;
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributePosixFd = 103;
constexpr int kAttributeDmaBuf = 124;
constexpr int kAttributeFabric = 128;

constexpr int kHandlePosixFd = 1;
constexpr int kHandleFabric = 8;
constexpr int kAllocationPinned = 1;
constexpr int kLocationDevice = 1;
constexpr int kAccessReadWrite = 3;
constexpr int kGranularityMinimum = 0;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostRegisterDeviceMap = 2;
constexpr unsigned kIpcLazyPeerAccess = 1;
constexpr unsigned kStreamNonBlocking = 1;

struct Location {
  int type;
  int id;
};
struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* win32_metadata;
  unsigned char compression;
  unsigned char rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};
struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Location) == 8 && sizeof(AllocationProperties) == 32 && sizeof(Access) == 12);
static_assert(offsetof(AllocationProperties, location) == 8 && offsetof(AllocationProperties, compression) == 24);

/// The functions, named like their exports.
struct Api {
  Library from;

  Result (*cuInit)(unsigned flags) = from("cuInit");
  Result (*cuGetErrorName)(Result error, const char** name) = from("cuGetErrorName");
  Result (*cuGetErrorString)(Result error, const char** text) = from("cuGetErrorString");
  Result (*cuDeviceGetCount)(int* count) = from("cuDeviceGetCount");
  Result (*cuDeviceGet)(Device* device, int ordinal) = from("cuDeviceGet");
  Result (*cuDeviceGetName)(char* name, int bytes, Device device) = from("cuDeviceGetName");
  Result (*cuDeviceGetUuid_v2)(Uuid* uuid, Device device) = from("cuDeviceGetUuid_v2");
  Result (*cuDeviceGetPCIBusId)(char* id, int bytes, Device device) = from("cuDeviceGetPCIBusId");
  Result (*cuDeviceTotalMem_v2)(size_t* bytes, Device device) = from("cuDeviceTotalMem_v2");
  Result (*cuDeviceGetAttribute)(int* value, int attribute, Device device) = from("cuDeviceGetAttribute");
  Result (*cuDeviceCanAccessPeer)(int* can, Device device, Device peer) = from("cuDeviceCanAccessPeer");
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device) = from("cuDevicePrimaryCtxRetain");
  Result (*cuCtxPushCurrent_v2)(Context context) = from("cuCtxPushCurrent_v2");
  Result (*cuCtxPopCurrent_v2)(Context* context) = from("cuCtxPopCurrent_v2");
  Result (*cuCtxEnablePeerAccess)(Context peer, unsigned flags) = from("cuCtxEnablePeerAccess");
  Result (*cuMemGetAllocationGranularity)(size_t* bytes, const AllocationProperties* properties,
                                          int option) = from("cuMemGetAllocationGranularity");
  Result (*cuMemCreate)(Allocation* memory, size_t bytes, const AllocationProperties* properties,
                        unsigned long long flags) = from("cuMemCreate");
  Result (*cuMemRelease)(Allocation memory) = from("cuMemRelease");
  Result (*cuMemAddressReserve)(Pointer* at, size_t bytes, size_t alignment, Pointer wish,
                                unsigned long long flags) = from("cuMemAddressReserve");
  Result (*cuMemAddressFree)(Pointer at, size_t bytes) = from("cuMemAddressFree");
  Result (*cuMemMap)(Pointer at, size_t bytes, size_t offset, Allocation memory,
                     unsigned long long flags) = from("cuMemMap");
  Result (*cuMemUnmap)(Pointer at, size_t bytes) = from("cuMemUnmap");
  Result (*cuMemSetAccess)(Pointer at, size_t bytes, const Access* access, size_t count) = from("cuMemSetAccess");
  Result (*cuMemExportToShareableHandle)(void* handle, Allocation memory, int type,
                                         unsigned long long flags) = from("cuMemExportToShareableHandle");
  Result (*cuMemImportFromShareableHandle)(Allocation* memory, void* handle,
                                           int type) = from("cuMemImportFromShareableHandle");
  Result (*cuMemAlloc_v2)(Pointer* at, size_t bytes) = from("cuMemAlloc_v2");
  Result (*cuMemFree_v2)(Pointer at) = from("cuMemFree_v2");
  Result (*cuMemGetAddressRange_v2)(Pointer* begin, size_t* bytes, Pointer at) = from("cuMemGetAddressRange_v2");
  Result (*cuIpcGetMemHandle)(IpcHandle* handle, Pointer at) = from("cuIpcGetMemHandle");
  Result (*cuIpcOpenMemHandle_v2)(Pointer* at, IpcHandle handle, unsigned flags) = from("cuIpcOpenMemHandle_v2");
  Result (*cuIpcCloseMemHandle)(Pointer at) = from("cuIpcCloseMemHandle");
  Result (*cuMemHostRegister_v2)(void* memory, size_t bytes, unsigned flags) = from("cuMemHostRegister_v2");
  Result (*cuMemHostUnregister)(void* memory) = from("cuMemHostUnregister");
  Result (*cuMemHostGetDevicePointer_v2)(Pointer* at, void* memory,
                                         unsigned flags) = from("cuMemHostGetDevicePointer_v2");
  Result (*cuStreamCreate)(Stream* stream, unsigned flags) = from("cuStreamCreate");
  Result (*cuStreamDestroy_v2)(Stream stream) = from("cuStreamDestroy_v2");
  Result (*cuStreamQuery)(Stream stream) = from("cuStreamQuery");
  Result (*cuMemcpyAsync)(Pointer to, Pointer from, size_t bytes, Stream stream) = from("cuMemcpyAsync");
  Result (*cuMemsetD8Async)(Pointer to, unsigned char value, size_t count, Stream stream) = from("cuMemsetD8Async");
  Result (*cuThreadExchangeStreamCaptureMode)(int* mode) = from("cuThreadExchangeStreamCaptureMode");
};

}  // namespace nvx::cuda
