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

/// The functions, by their exported names.
struct Api {
  Library from;

  Result (*nvmlInit_v2)() = from("nvmlInit_v2");
  Result (*nvmlShutdown)() = from("nvmlShutdown");
  const char* (*nvmlErrorString)(Result result) = from("nvmlErrorString");
  Result (*nvmlSystemGetDriverVersion)(char* version, unsigned bytes) = from("nvmlSystemGetDriverVersion");
  Result (*nvmlDeviceGetCount_v2)(unsigned* count) = from("nvmlDeviceGetCount_v2");
  Result (*nvmlDeviceGetHandleByIndex_v2)(unsigned index, Device* device) = from("nvmlDeviceGetHandleByIndex_v2");
  Result (*nvmlDeviceGetName)(Device device, char* name, unsigned bytes) = from("nvmlDeviceGetName");
  Result (*nvmlDeviceGetUUID)(Device device, char* uuid, unsigned bytes) = from("nvmlDeviceGetUUID");
  Result (*nvmlDeviceGetPciInfo_v3)(Device device, PciInfo* info) = from("nvmlDeviceGetPciInfo_v3");
  Result (*nvmlDeviceGetCudaComputeCapability)(Device device, int* major,
                                               int* minor) = from("nvmlDeviceGetCudaComputeCapability");
  Result (*nvmlDeviceGetCurrPcieLinkGeneration)(Device device,
                                                unsigned* generation) = from("nvmlDeviceGetCurrPcieLinkGeneration");
  Result (*nvmlDeviceGetCurrPcieLinkWidth)(Device device, unsigned* width) = from("nvmlDeviceGetCurrPcieLinkWidth");
  Result (*nvmlDeviceGetMaxPcieLinkGeneration)(Device device,
                                               unsigned* generation) = from("nvmlDeviceGetMaxPcieLinkGeneration");
  Result (*nvmlDeviceGetMaxPcieLinkWidth)(Device device, unsigned* width) = from("nvmlDeviceGetMaxPcieLinkWidth");
  Result (*nvmlDeviceGetNvLinkState)(Device device, unsigned lane, int* active) = from("nvmlDeviceGetNvLinkState");
  Result (*nvmlDeviceGetNvLinkVersion)(Device device, unsigned lane,
                                       unsigned* version) = from("nvmlDeviceGetNvLinkVersion");
  Result (*nvmlDeviceGetNvLinkCapability)(Device device, unsigned lane, int capability,
                                          unsigned* has) = from("nvmlDeviceGetNvLinkCapability");
  Result (*nvmlDeviceGetNvLinkRemotePciInfo_v2)(Device device, unsigned lane,
                                                PciInfo* info) = from("nvmlDeviceGetNvLinkRemotePciInfo_v2");
  Result (*nvmlDeviceGetNvLinkRemoteDeviceType)(Device device, unsigned lane,
                                                int* type) = from("nvmlDeviceGetNvLinkRemoteDeviceType");
  Result (*nvmlDeviceGetFieldValues)(Device device, int count, FieldValue* values) = from("nvmlDeviceGetFieldValues");
  Result (*nvmlDeviceGetTopologyCommonAncestor)(Device a, Device b,
                                                int* level) = from("nvmlDeviceGetTopologyCommonAncestor");
  Result (*nvmlDeviceGetP2PStatus)(Device a, Device b, int capability, int* status) = from("nvmlDeviceGetP2PStatus");
};

}  // namespace nvx::nvml
