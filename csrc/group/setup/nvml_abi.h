#pragma once

#include <cstddef>
#include <cstdint>

#include "base/library.h"

/// The part of the ABI of `libnvidia-ml.so.1` that nvx calls, so that the build needs no NVML header. If the header is
/// installed, a test compares this file with it.
namespace nvx::nvml {

using Result = int;
using Device = void*;

constexpr Result kSuccess = 0;
constexpr unsigned kMostLanes = 36;
constexpr int kCapabilityValid = 5;
constexpr int kLaneToSwitch = 2;
constexpr int kPeerRead = 0;
constexpr int kPeerWrite = 1;
// MB/s in one direction: of the lane in the field's scope, or of all lanes if the driver has no other value.
constexpr unsigned kFieldSpeedOfLane = 164;
constexpr unsigned kFieldSpeedOfLanes = 90;

struct PciInfo {
  char bus_legacy[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned device_id;
  unsigned subsystem_id;
  char bus_id[32];
};
static_assert(sizeof(PciInfo) == 68);

struct FieldValue {
  unsigned field;
  unsigned scope;
  int64_t timestamp;
  int64_t latency_us;
  int type;
  Result result;
  union {
    double real;
    unsigned number;
    uint64_t large;
  } value;
};
static_assert(sizeof(FieldValue) == 40 && offsetof(FieldValue, value) == 32);

struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  Result status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
static_assert(sizeof(FabricInfo) == 36 && offsetof(FabricInfo, health) == 32);
constexpr unsigned kFabricInfoVersion = unsigned(sizeof(FabricInfo)) | 2u << 24;
constexpr unsigned char kFabricComplete = 3;
/// Drivers before 545 do not have it, so it is looked up at its use.
using GetGpuFabricInfo = Result(Device device, FabricInfo* info);
constexpr const char* kGetGpuFabricInfo = "nvmlDeviceGetGpuFabricInfoV";

/// The functions, by their exported names.
struct Api {
  Library from;

  NVX_FUNCTION(Result, nvmlInit_v2);
  NVX_FUNCTION(Result, nvmlShutdown);
  NVX_FUNCTION(const char*, nvmlErrorString, Result result);
  NVX_FUNCTION(Result, nvmlSystemGetDriverVersion, char* version, unsigned bytes);
  NVX_FUNCTION(Result, nvmlDeviceGetCount_v2, unsigned* count);
  NVX_FUNCTION(Result, nvmlDeviceGetHandleByIndex_v2, unsigned index, Device* device);
  NVX_FUNCTION(Result, nvmlDeviceGetName, Device device, char* name, unsigned bytes);
  NVX_FUNCTION(Result, nvmlDeviceGetUUID, Device device, char* uuid, unsigned bytes);
  NVX_FUNCTION(Result, nvmlDeviceGetPciInfo_v3, Device device, PciInfo* info);
  NVX_FUNCTION(Result, nvmlDeviceGetCudaComputeCapability, Device device, int* major, int* minor);
  NVX_FUNCTION(Result, nvmlDeviceGetCurrPcieLinkGeneration, Device device, unsigned* generation);
  NVX_FUNCTION(Result, nvmlDeviceGetCurrPcieLinkWidth, Device device, unsigned* width);
  NVX_FUNCTION(Result, nvmlDeviceGetMaxPcieLinkGeneration, Device device, unsigned* generation);
  NVX_FUNCTION(Result, nvmlDeviceGetMaxPcieLinkWidth, Device device, unsigned* width);
  NVX_FUNCTION(Result, nvmlDeviceGetNvLinkState, Device device, unsigned lane, int* active);
  NVX_FUNCTION(Result, nvmlDeviceGetNvLinkVersion, Device device, unsigned lane, unsigned* version);
  NVX_FUNCTION(Result, nvmlDeviceGetNvLinkCapability, Device device, unsigned lane, int capability, unsigned* has);
  NVX_FUNCTION(Result, nvmlDeviceGetNvLinkRemotePciInfo_v2, Device device, unsigned lane, PciInfo* info);
  NVX_FUNCTION(Result, nvmlDeviceGetNvLinkRemoteDeviceType, Device device, unsigned lane, int* type);
  NVX_FUNCTION(Result, nvmlDeviceGetFieldValues, Device device, int count, FieldValue* values);
  NVX_FUNCTION(Result, nvmlDeviceGetTopologyCommonAncestor, Device a, Device b, int* level);
  NVX_FUNCTION(Result, nvmlDeviceGetP2PStatus, Device a, Device b, int capability, int* status);
};

}  // namespace nvx::nvml
