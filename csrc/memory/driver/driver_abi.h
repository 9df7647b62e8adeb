#pragma once

#include <cstddef>

/// The functions of libcuda.so.1 that nvx calls, declared here so that no CUDA header is needed to build. If there is
/// one, a test compares the declarations with it.
namespace nvx::cuda {

using Result = int;
using Device = int;
using Context = void*;
using Stream = void*;
using Pointer = unsigned long long;
using Allocation = unsigned long long;

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

struct Uuid {
  char bytes[16];
};
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
struct IpcHandle {
  char reserved[64];
};
static_assert(sizeof(Location) == 8 && sizeof(AllocationProperties) == 32 && sizeof(Access) == 12);
static_assert(offsetof(AllocationProperties, location) == 8 && offsetof(AllocationProperties, compression) == 24);

/// The functions, named like their exports.
struct Api {
  Result (*cuInit)(unsigned flags);
  Result (*cuGetErrorName)(Result error, const char** name);
  Result (*cuGetErrorString)(Result error, const char** text);
  Result (*cuDeviceGetCount)(int* count);
  Result (*cuDeviceGet)(Device* device, int ordinal);
  Result (*cuDeviceGetName)(char* name, int bytes, Device device);
  Result (*cuDeviceGetUuid_v2)(Uuid* uuid, Device device);
  Result (*cuDeviceGetPCIBusId)(char* id, int bytes, Device device);
  Result (*cuDeviceTotalMem_v2)(size_t* bytes, Device device);
  Result (*cuDeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*cuDeviceCanAccessPeer)(int* can, Device device, Device peer);
  Result (*cuDevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*cuCtxPushCurrent_v2)(Context context);
  Result (*cuCtxPopCurrent_v2)(Context* context);
  Result (*cuCtxEnablePeerAccess)(Context peer, unsigned flags);
  Result (*cuMemGetAllocationGranularity)(size_t* bytes, const AllocationProperties* properties, int option);
  Result (*cuMemCreate)(Allocation* memory, size_t bytes, const AllocationProperties* properties,
                        unsigned long long flags);
  Result (*cuMemRelease)(Allocation memory);
  Result (*cuMemAddressReserve)(Pointer* at, size_t bytes, size_t alignment, Pointer wish, unsigned long long flags);
  Result (*cuMemAddressFree)(Pointer at, size_t bytes);
  Result (*cuMemMap)(Pointer at, size_t bytes, size_t offset, Allocation memory, unsigned long long flags);
  Result (*cuMemUnmap)(Pointer at, size_t bytes);
  Result (*cuMemSetAccess)(Pointer at, size_t bytes, const Access* access, size_t count);
  Result (*cuMemExportToShareableHandle)(void* handle, Allocation memory, int type, unsigned long long flags);
  Result (*cuMemImportFromShareableHandle)(Allocation* memory, void* handle, int type);
  Result (*cuMemAlloc_v2)(Pointer* at, size_t bytes);
  Result (*cuMemFree_v2)(Pointer at);
  Result (*cuMemGetAddressRange_v2)(Pointer* begin, size_t* bytes, Pointer at);
  Result (*cuIpcGetMemHandle)(IpcHandle* handle, Pointer at);
  Result (*cuIpcOpenMemHandle_v2)(Pointer* at, IpcHandle handle, unsigned flags);
  Result (*cuIpcCloseMemHandle)(Pointer at);
  Result (*cuMemHostRegister_v2)(void* memory, size_t bytes, unsigned flags);
  Result (*cuMemHostUnregister)(void* memory);
  Result (*cuMemHostGetDevicePointer_v2)(Pointer* at, void* memory, unsigned flags);
  Result (*cuStreamCreate)(Stream* stream, unsigned flags);
  Result (*cuStreamDestroy_v2)(Stream stream);
  Result (*cuStreamQuery)(Stream stream);
  Result (*cuMemcpyAsync)(Pointer to, Pointer from, size_t bytes, Stream stream);
  Result (*cuMemsetD8Async)(Pointer to, unsigned char value, size_t count, Stream stream);
  Result (*cuThreadExchangeStreamCaptureMode)(int* mode);
};

}  // namespace nvx::cuda
