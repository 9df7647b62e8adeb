// The declarations of libcuda's ABI against cuda.h if there is one, and the errors without a driver.

#include "memory/driver/driver_library.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <functional>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/driver_abi.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "memory/gpu/device_arena.h"
#include "memory/gpu/device_measure.h"
#include "memory/gpu/peer_mappings.h"

#if __has_include(<cuda.h>)
#include <cuda.h>
#endif

namespace nvx {
namespace {

TEST(DriverLibrary, ReportsWhereThereIsNone) {
  try {
    (void)driver_library("libcuda-that-is-not-there.so.1");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kSystem);
    EXPECT_NE(std::string(error.what()).find("no NVIDIA driver here"), std::string::npos) << error.what();
  }
}

TEST(DriverLibrary, AnotherLibraryIsNone) {
  try {
    (void)driver_library("libm.so.6");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("libm.so.6 has no cuInit"), std::string::npos) << error.what();
  }
}

int query(const char* name) {
  void* handle = dlopen(NVX_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<int (*)()>(dlsym(handle, name))();
}

TEST(DriverLibrary, OneThatDoesNotBeginToWorkIsNotWaitedForLong) {
  query("fake_hold");
  try {
    (void)driver_library(NVX_FAKE_CUDA, std::chrono::milliseconds(50));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_STREQ(error.what(), "nvx: cuInit of the NVIDIA driver did not return within 50 ms");
  }
  query("fake_release");
  (void)driver_library(NVX_FAKE_CUDA);
}

TEST(DriverLibrary, TellsWhichStreamsAreCaptured) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  const auto stream = [](intptr_t handle) { return reinterpret_cast<void*>(handle); };
  EXPECT_FALSE(is_captured(stream(100)));
  EXPECT_TRUE(is_captured(stream(101)));
  EXPECT_TRUE(is_captured(stream(102))) << "invalidated";
  EXPECT_FALSE(is_captured(nullptr));
  if (kernel::built_with_cuda()) return;  // it asks the CUDA runtime
  EXPECT_EQ(kernel::capture_of(stream(100)), 0u);
  EXPECT_EQ(kernel::capture_of(stream(101)), UINT64_MAX);
}

TEST(DriverLibrary, DescribesTheDriversFacts) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  int count = 0;
  ASSERT_EQ(driver->count(&count), 0);
  EXPECT_EQ(count, 2);
  DeviceProperties properties;
  ASSERT_EQ(driver->describe(1, &properties), 0);
  EXPECT_EQ(properties.name, "Fake 11");
  EXPECT_EQ(properties.bus, "0000:0B:00.0");
  EXPECT_EQ(properties.uuid[15], 11);
  EXPECT_EQ(properties.bytes, size_t(11) << 30);
  EXPECT_FALSE(properties.can[int(ShareKind::kFabric)]) << "an attribute that an old driver does not know";
  EXPECT_TRUE(properties.can[int(ShareKind::kFd)]);
  EXPECT_TRUE(properties.exports_dma_buf);
  EXPECT_EQ(properties.architecture, 90);
  EXPECT_EQ(properties.cuda, 13000);
  EXPECT_NE(driver->describe(2, &properties), 0);
  EXPECT_EQ(driver->error_text(1), "FAKE_INVALID (as a test wants it)");
  EXPECT_EQ(driver->error_text(9), "error 9");
}

/// Every kind of memory through the driver's exported functions: created, exported, imported, written and read.
TEST(DriverLibrary, EachKindWorks) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  const auto pinned = std::make_shared<PinnedMemory>(driver);
  constexpr size_t kBytes = 4 << 20;
  for (const ShareKind kind : {ShareKind::kFd, ShareKind::kIpc}) {
    EXPECT_TRUE(probe_share_kinds(pinned, 0).has(kind)) << probe_share_kinds(pinned, 0).why_not[int(kind)];
    const auto region = DeviceRegion::make(driver, 0, kind, kBytes);
    const auto seen = kind == ShareKind::kFd
                          ? DeviceRegion::import_fd(driver, 1, region->export_fd().get(), kBytes)
                          : DeviceRegion::import_handle(driver, 1, kind, region->export_handle(), kBytes);
    const Deadline deadline = Deadline::after(std::chrono::milliseconds(20'000));
    EXPECT_TRUE(run_check(pinned, {0, 0, 0, region->base() + kCheckBytes, 5}, deadline).fine());
    EXPECT_TRUE(run_check(pinned, {1, seen->base() + kCheckBytes, 5, 0, 0}, deadline).fine());
    EXPECT_EQ(run_check(pinned, {1, seen->base() + kCheckBytes, 6, 0, 0}, deadline).state, PairState::kCorrupt);
  }
  const auto plain = DeviceRegion::make(driver, 0, ShareKind::kIpc, kBytes);
  const auto memory = DeviceRegion::make(driver, 0, ShareKind::kFd, kBytes);
  const std::pair<std::function<void()>, const char*> kTooMuch[] = {
      {[&] { (void)DeviceRegion::import_handle(driver, 1, ShareKind::kIpc, plain->export_handle(), kBytes + 1); },
       "it has 4194304 bytes instead of the 4194305 that were offered"},
      {[&] { (void)DeviceRegion::import_fd(driver, 1, memory->export_fd().get(), 2 * kBytes); },
       "cuMemMap of 8388608 bytes on GPU 1: FAKE_INVALID"},
  };
  for (const auto& [import, reason] : kTooMuch) {
    try {
      import();
      ADD_FAILURE() << reason;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(query("fake_depth"), 0) << "each call leaves the thread's contexts as they were";
  EXPECT_FALSE(probe_share_kinds(pinned, 0).has(ShareKind::kFabric));
  EXPECT_GT(measure_pair(driver, 0, 1, Deadline::after(std::chrono::milliseconds(60'000))).gb_s, 0);
}

/// The driver refuses to create such memory on a GPU that cannot have it.
TEST(DriverLibrary, NetworkCardsCanAccessMemoryOfAGpuThatAllowsIt) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  constexpr size_t kBytes = 4 << 20;
  const int before = query("fake_for_rdma");
  (void)DeviceRegion::make(driver, 0, ShareKind::kFd, kBytes);
  EXPECT_EQ(query("fake_for_rdma"), before + 1);
  (void)DeviceRegion::make(driver, 1, ShareKind::kFd, kBytes);
  EXPECT_EQ(query("fake_for_rdma"), before + 1);
}

TEST(DriverLibrary, TellsWhichGpusNeedNoFlushAfterNetworkCards) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  for (const int device : {0, 1}) {
    DeviceProperties properties;
    ASSERT_EQ(driver->describe(device, &properties), 0);
    EXPECT_EQ(properties.orders_rdma, device == 0);
  }
  query("fake_turn_c2c");
  DeviceProperties properties;
  ASSERT_EQ(driver->describe(0, &properties), 0);
  EXPECT_FALSE(properties.orders_rdma) << "joined to the CPU by NVLink-C2C";
  query("fake_turn_c2c");
}

TEST(DriverLibrary, MulticastWorksWhereTheGpuHasIt) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  constexpr size_t kGranule = 2 << 20;
  size_t granularity = 0;
  EXPECT_EQ(driver->multicast_granularity(0, ShareKind::kFd, 2, &granularity), cuda::kNotSupported);
  query("fake_let_multicast");
  EXPECT_EQ(driver->multicast_granularity(1, ShareKind::kFd, 2, &granularity), cuda::kNotSupported);
  ASSERT_EQ(driver->multicast_granularity(0, ShareKind::kFd, 2, &granularity), 0);
  EXPECT_EQ(granularity, kGranule);
  DeviceMemory object = 0;
  ASSERT_EQ(driver->create_multicast(0, ShareKind::kFd, 2, kGranule, &object), 0);
  EXPECT_NE(driver->create_multicast(0, ShareKind::kFd, 1, kGranule, &object), 0) << "a team of one";
  EXPECT_EQ(driver->join_multicast(object, 0), 0);
  const auto memory = DeviceRegion::make(driver, 0, ShareKind::kFd, 2 * kGranule);
  EXPECT_EQ(driver->bind_multicast(object, 0, memory->memory(), kGranule, kGranule), 0);
  EXPECT_NE(driver->bind_multicast(object, 0, memory->memory(), 2 * kGranule, kGranule), 0) << "beyond its end";
  EXPECT_EQ(driver->unbind_multicast(object, 0, kGranule), 0);
  EXPECT_EQ(driver->release(object), 0);
  EXPECT_EQ(query("fake_depth"), 0);
}

TEST(DriverLibrary, KeepsOneContextADevice) {
  const int before = query("fake_retained");
  const auto driver = driver_library(NVX_FAKE_CUDA);
  DeviceRegistry registry(driver, 4 << 20);
  for (int turn = 0; turn < 3; ++turn) {
    for (const int device : {0, 1}) {
      DeviceArena& arena = registry.arena(device, ShareKind::kPointer);
      arena.free(arena.allocate(4096));
    }
    EXPECT_EQ(driver->enable_peer(0, 1), 0) << "that it was enabled before is no error";
  }
  EXPECT_EQ(query("fake_retained"), before + 2);
}

/// A context takes hundreds of MiB of its GPU. One process of eight must not hold eight.
TEST(DriverLibrary, GivesAccessWithoutAContextOnTheOtherDevice) {
  const auto driver = driver_library(NVX_FAKE_CUDA);
  const int before = query("fake_retained");
  (void)query("fake_allowed");
  DevicePool pool(driver, 0, {.timeout = std::chrono::milliseconds(10'000)});
  (void)pool.allocate(4 << 20);
  EXPECT_EQ(query("fake_allowed"), 3) << "both GPUs";
  EXPECT_EQ(query("fake_retained"), before + 1);
}

#ifdef CUDA_VERSION

/// Arguments use the same registers: the same number, sizes, and pointers.
template <class R, class... A, class S, class... B>
constexpr bool same_shape(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
                                       std::is_class_v<A> == std::is_class_v<B>)&&...);
  }
}

// The names in the headers are macros for the exported names: cuMemAlloc is cuMemAlloc_v2.
#define EXPECT_SHAPE_OF(ours, theirs) \
  static_assert(same_shape(decltype(ours)(), decltype (&theirs)()), "cuda.h declares it otherwise")
#define EXPECT_SHAPE(ours, theirs) EXPECT_SHAPE_OF(cuda::Api::ours, theirs)
EXPECT_SHAPE(cuInit, cuInit);
EXPECT_SHAPE(cuGetErrorName, cuGetErrorName);
EXPECT_SHAPE(cuGetErrorString, cuGetErrorString);
EXPECT_SHAPE(cuDriverGetVersion, cuDriverGetVersion);
EXPECT_SHAPE(cuDeviceGetCount, cuDeviceGetCount);
EXPECT_SHAPE(cuDeviceGet, cuDeviceGet);
EXPECT_SHAPE(cuDeviceGetName, cuDeviceGetName);
EXPECT_SHAPE(cuDeviceGetUuid_v2, cuDeviceGetUuid);
EXPECT_SHAPE(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId);
EXPECT_SHAPE(cuDeviceTotalMem_v2, cuDeviceTotalMem);
EXPECT_SHAPE(cuDeviceGetAttribute, cuDeviceGetAttribute);
EXPECT_SHAPE(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer);
EXPECT_SHAPE(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
EXPECT_SHAPE(cuCtxPushCurrent_v2, cuCtxPushCurrent);
EXPECT_SHAPE(cuCtxPopCurrent_v2, cuCtxPopCurrent);
EXPECT_SHAPE(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess);
EXPECT_SHAPE(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity);
EXPECT_SHAPE(cuMemCreate, cuMemCreate);
EXPECT_SHAPE(cuMemRelease, cuMemRelease);
EXPECT_SHAPE(cuMemAddressReserve, cuMemAddressReserve);
EXPECT_SHAPE(cuMemAddressFree, cuMemAddressFree);
EXPECT_SHAPE(cuMemMap, cuMemMap);
EXPECT_SHAPE(cuMemUnmap, cuMemUnmap);
EXPECT_SHAPE(cuMemSetAccess, cuMemSetAccess);
EXPECT_SHAPE(cuMemExportToShareableHandle, cuMemExportToShareableHandle);
EXPECT_SHAPE(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle);
EXPECT_SHAPE(cuMemAlloc_v2, cuMemAlloc);
EXPECT_SHAPE(cuMemFree_v2, cuMemFree);
EXPECT_SHAPE(cuMemGetAddressRange_v2, cuMemGetAddressRange);
EXPECT_SHAPE(cuIpcGetMemHandle, cuIpcGetMemHandle);
EXPECT_SHAPE(cuIpcOpenMemHandle_v2, cuIpcOpenMemHandle);
EXPECT_SHAPE(cuIpcCloseMemHandle, cuIpcCloseMemHandle);
EXPECT_SHAPE(cuMemHostRegister_v2, cuMemHostRegister);
EXPECT_SHAPE(cuMemHostUnregister, cuMemHostUnregister);
EXPECT_SHAPE(cuMemHostGetDevicePointer_v2, cuMemHostGetDevicePointer);
EXPECT_SHAPE(cuStreamCreateWithPriority, cuStreamCreateWithPriority);
EXPECT_SHAPE(cuStreamDestroy_v2, cuStreamDestroy);
EXPECT_SHAPE(cuStreamQuery, cuStreamQuery);
EXPECT_SHAPE(cuMemcpyAsync, cuMemcpyAsync);
EXPECT_SHAPE(cuMemsetD8Async, cuMemsetD8Async);
EXPECT_SHAPE(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode);
EXPECT_SHAPE_OF(cuda::Multicast::cuMulticastGetGranularity, cuMulticastGetGranularity);
EXPECT_SHAPE_OF(cuda::Multicast::cuMulticastCreate, cuMulticastCreate);
EXPECT_SHAPE_OF(cuda::Multicast::cuMulticastAddDevice, cuMulticastAddDevice);
EXPECT_SHAPE_OF(cuda::Multicast::cuMulticastBindMem, cuMulticastBindMem);
EXPECT_SHAPE_OF(cuda::Multicast::cuMulticastUnbind, cuMulticastUnbind);
static_assert(same_shape(static_cast<cuda::StreamIsCapturing*>(nullptr), decltype (&cuStreamIsCapturing)()));
static_assert(sizeof(cuda::Api) == sizeof(Library) + 41 * sizeof(void*), "compare a new function with cuda.h above");

static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cuda::kNotCaptured == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cuda::kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(cuda::kAttributeKernelTimeLimit == CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT);
static_assert(cuda::kAttributeCanMapHost == CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY);
static_assert(cuda::kAttributeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cuda::kAttributeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(cuda::kAttributeHostPageTables == CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES);
static_assert(cuda::kAttributeVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(cuda::kAttributePosixFd == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
static_assert(cuda::kAttributeRdma == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(cuda::kAttributeDmaBuf == CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);
static_assert(cuda::kAttributeRdmaOrdering == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
static_assert(cuda::kRdmaOrderedForOwner == CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER);
static_assert(cuda::kAttributeFabric == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
static_assert(cuda::kAttributeMulticast == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
static_assert(cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(sizeof(cuda::MulticastProperties) == sizeof(CUmulticastObjectProp) &&
              offsetof(cuda::MulticastProperties, bytes) == offsetof(CUmulticastObjectProp, size) &&
              offsetof(cuda::MulticastProperties, handle_types) == offsetof(CUmulticastObjectProp, handleTypes));
static_assert(cuda::kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(cuda::kHandleFabric == CU_MEM_HANDLE_TYPE_FABRIC);
static_assert(cuda::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cuda::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cuda::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(cuda::kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(cuda::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(cuda::kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(cuda::kIpcLazyPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(sizeof(cuda::Uuid) == sizeof(CUuuid) && sizeof(cuda::IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(cuda::Access) == sizeof(CUmemAccessDesc) &&
              offsetof(cuda::Access, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(cuda::AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(cuda::AllocationProperties, handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(cuda::AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(cuda::AllocationProperties, compression) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(CUmemFabricHandle) == sizeof(HandleBytes));

TEST(DriverLibrary, MatchesTheHeaders) { EXPECT_GE(CUDA_VERSION, 12030) << "older versions have no fabric handles"; }

#endif

}  // namespace
}  // namespace nvx
