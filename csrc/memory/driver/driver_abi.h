#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/library.h"

/// The functions of libcuda.so.1 that nvx calls, so that no CUDA header is needed; a test compares them with one.
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
constexpr int kNotCaptured = 0;
constexpr Result kPeerAccessAlreadyEnabled = 704;
constexpr Result kNotSupported = 801;

constexpr int kAttributeKernelTimeLimit = 17;
constexpr int kAttributeCanMapHost = 19;
constexpr int kAttributeMajor = 75, kAttributeMinor = 76;  // of the compute capability
constexpr int kAttributeHostPageTables = 100;              // the GPU uses the CPU's, as over NVLink-C2C
constexpr int kAttributeVirtualMemory = 102;
constexpr int kAttributePosixFd = 103;
constexpr int kAttributeRdma = 110;          // of virtual memory
constexpr int kAttributeRdmaOrdering = 118;  // for whom writes need no flush
constexpr int kAttributeDmaBuf = 124;
constexpr int kAttributeFabric = 128;
constexpr int kAttributeMulticast = 132;

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
constexpr int kRdmaOrderedForOwner = 100;  // larger: for other devices too
constexpr int kFirst = -1000;              // the driver takes the highest priority that the device has

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
struct MulticastProperties {
  unsigned devices;
  size_t bytes;
  unsigned long long handle_types;
  unsigned long long flags;
};
static_assert(sizeof(Location) == 8 && sizeof(AllocationProperties) == 32 && sizeof(Access) == 12);
static_assert(offsetof(AllocationProperties, location) == 8 && offsetof(AllocationProperties, compression) == 24);

/// The functions, named like their exports: queries of devices, and the rest.
struct QueryApi {
  Library from;

  NVX_FUNCTION(Result, cuInit, unsigned flags);
  NVX_FUNCTION(Result, cuGetErrorName, Result error, const char** name);
  NVX_FUNCTION(Result, cuGetErrorString, Result error, const char** text);
  NVX_FUNCTION(Result, cuDriverGetVersion, int* version);
  NVX_FUNCTION(Result, cuDeviceGetCount, int* count);
  NVX_FUNCTION(Result, cuDeviceGet, Device* device, int ordinal);
  NVX_FUNCTION(Result, cuDeviceGetName, char* name, int bytes, Device device);
  NVX_FUNCTION(Result, cuDeviceGetUuid_v2, Uuid* uuid, Device device);
  NVX_FUNCTION(Result, cuDeviceGetPCIBusId, char* id, int bytes, Device device);
  NVX_FUNCTION(Result, cuDeviceTotalMem_v2, size_t* bytes, Device device);
  NVX_FUNCTION(Result, cuDeviceGetAttribute, int* value, int attribute, Device device);
  NVX_FUNCTION(Result, cuDeviceCanAccessPeer, int* can, Device device, Device peer);
};
struct Api : QueryApi {
  NVX_FUNCTION(Result, cuDevicePrimaryCtxRetain, Context* context, Device device);
  NVX_FUNCTION(Result, cuCtxPushCurrent_v2, Context context);
  NVX_FUNCTION(Result, cuCtxPopCurrent_v2, Context* context);
  NVX_FUNCTION(Result, cuCtxEnablePeerAccess, Context peer, unsigned flags);
  NVX_FUNCTION(Result, cuMemGetAllocationGranularity, size_t* bytes, const AllocationProperties* properties,
               int option);
  NVX_FUNCTION(Result, cuMemCreate, Allocation* memory, size_t bytes, const AllocationProperties* properties,
               unsigned long long flags);
  NVX_FUNCTION(Result, cuMemRelease, Allocation memory);
  NVX_FUNCTION(Result, cuMemAddressReserve, Pointer* at, size_t bytes, size_t alignment, Pointer wish,
               unsigned long long flags);
  NVX_FUNCTION(Result, cuMemAddressFree, Pointer at, size_t bytes);
  NVX_FUNCTION(Result, cuMemMap, Pointer at, size_t bytes, size_t offset, Allocation memory, unsigned long long flags);
  NVX_FUNCTION(Result, cuMemUnmap, Pointer at, size_t bytes);
  NVX_FUNCTION(Result, cuMemSetAccess, Pointer at, size_t bytes, const Access* access, size_t count);
  NVX_FUNCTION(Result, cuMemExportToShareableHandle, void* handle, Allocation memory, int type,
               unsigned long long flags);
  NVX_FUNCTION(Result, cuMemImportFromShareableHandle, Allocation* memory, void* handle, int type);
  NVX_FUNCTION(Result, cuMemAlloc_v2, Pointer* at, size_t bytes);
  NVX_FUNCTION(Result, cuMemFree_v2, Pointer at);
  NVX_FUNCTION(Result, cuMemGetAddressRange_v2, Pointer* begin, size_t* bytes, Pointer at);
  NVX_FUNCTION(Result, cuIpcGetMemHandle, IpcHandle* handle, Pointer at);
  NVX_FUNCTION(Result, cuIpcOpenMemHandle_v2, Pointer* at, IpcHandle handle, unsigned flags);
  NVX_FUNCTION(Result, cuIpcCloseMemHandle, Pointer at);
  NVX_FUNCTION(Result, cuMemHostRegister_v2, void* memory, size_t bytes, unsigned flags);
  NVX_FUNCTION(Result, cuMemHostUnregister, void* memory);
  NVX_FUNCTION(Result, cuMemHostGetDevicePointer_v2, Pointer* at, void* memory, unsigned flags);
  NVX_FUNCTION(Result, cuStreamCreateWithPriority, Stream* stream, unsigned flags, int priority);
  NVX_FUNCTION(Result, cuStreamDestroy_v2, Stream stream);
  NVX_FUNCTION(Result, cuStreamQuery, Stream stream);
  NVX_FUNCTION(Result, cuMemcpyAsync, Pointer to, Pointer from, size_t bytes, Stream stream);
  NVX_FUNCTION(Result, cuMemsetD8Async, Pointer to, unsigned char value, size_t count, Stream stream);
  NVX_FUNCTION(Result, cuThreadExchangeStreamCaptureMode, int* mode);
};

/// Looked up at its use, where a driver is loaded already.
using StreamIsCapturing = Result(Stream stream, int* status);

/// Since CUDA 12.1. Looked up when a group first requests them.
struct Multicast {
  Library from;

  NVX_FUNCTION(Result, cuMulticastGetGranularity, size_t* bytes, const MulticastProperties* properties, int option);
  NVX_FUNCTION(Result, cuMulticastCreate, Allocation* object, const MulticastProperties* properties);
  NVX_FUNCTION(Result, cuMulticastAddDevice, Allocation object, Device device);
  NVX_FUNCTION(Result, cuMulticastBindMem, Allocation object, size_t at, Allocation memory, size_t offset, size_t bytes,
               unsigned long long flags);
  NVX_FUNCTION(Result, cuMulticastUnbind, Allocation object, Device device, size_t at, size_t bytes);
};

}  // namespace nvx::cuda
