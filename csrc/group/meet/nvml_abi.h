#pragma once

#include <cstddef>
#include <cstdint>

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

/// The functions, by their exported names.
struct Api {
  Result (*nvmlInit_v2)();
  Result (*nvmlShutdown)();
  const char* (*nvmlErrorString)(Result result);
  Result (*nvmlSystemGetDriverVersion)(char* version, unsigned bytes);
  Result (*nvmlDeviceGetCount_v2)(unsigned* count);
  Result (*nvmlDeviceGetHandleByIndex_v2)(unsigned index, Device* device);
  Result (*nvmlDeviceGetName)(Device device, char* name, unsigned bytes);
  Result (*nvmlDeviceGetUUID)(Device device, char* uuid, unsigned bytes);
  Result (*nvmlDeviceGetPciInfo_v3)(Device device, PciInfo* info);
  Result (*nvmlDeviceGetCudaComputeCapability)(Device device, int* major, int* minor);
  Result (*nvmlDeviceGetCurrPcieLinkGeneration)(Device device, unsigned* generation);
  Result (*nvmlDeviceGetCurrPcieLinkWidth)(Device device, unsigned* width);
  Result (*nvmlDeviceGetMaxPcieLinkGeneration)(Device device, unsigned* generation);
  Result (*nvmlDeviceGetMaxPcieLinkWidth)(Device device, unsigned* width);
  Result (*nvmlDeviceGetNvLinkState)(Device device, unsigned lane, int* active);
  Result (*nvmlDeviceGetNvLinkVersion)(Device device, unsigned lane, unsigned* version);
  Result (*nvmlDeviceGetNvLinkCapability)(Device device, unsigned lane, int capability, unsigned* has);
  Result (*nvmlDeviceGetNvLinkRemotePciInfo_v2)(Device device, unsigned lane, PciInfo* info);
  Result (*nvmlDeviceGetNvLinkRemoteDeviceType)(Device device, unsigned lane, int* type);
  Result (*nvmlDeviceGetFieldValues)(Device device, int count, FieldValue* values);
  Result (*nvmlDeviceGetTopologyCommonAncestor)(Device a, Device b, int* level);
  Result (*nvmlDeviceGetP2PStatus)(Device a, Device b, int capability, int* status);
};

}  // namespace nvx::nvml
