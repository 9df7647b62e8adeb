// Compares nvx's declarations of NVML's ABI with nvml.h, if that is installed.

#include <gtest/gtest.h>

#include <type_traits>

#include "group/setup/nvml_abi.h"

#if __has_include(<nvml.h>)
#include <nvml.h>
#endif

namespace nvx {
namespace {

TEST(NvmlLibrary, LayoutsHaveNoGaps) {
  EXPECT_EQ(offsetof(nvml::PciInfo, domain), 16u);
  EXPECT_EQ(offsetof(nvml::PciInfo, bus_id), 36u);
  EXPECT_EQ(offsetof(nvml::FieldValue, type), 24u);
  EXPECT_EQ(offsetof(nvml::FieldValue, result), 28u);
}

#ifdef NVML_API_VERSION

/// Arguments use the same registers: the same number, the same sizes, and pointers in the same places.
template <class R, class... A, class S, class... B>
constexpr bool same_shape(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>)&&...);
  }
}

#define EXPECT_SHAPE(name) \
  static_assert(same_shape(decltype(nvml::Api::name)(), decltype (&::name)()), "nvml.h declares " #name " otherwise")
EXPECT_SHAPE(nvmlInit_v2);
EXPECT_SHAPE(nvmlShutdown);
EXPECT_SHAPE(nvmlErrorString);
EXPECT_SHAPE(nvmlSystemGetDriverVersion);
EXPECT_SHAPE(nvmlDeviceGetCount_v2);
EXPECT_SHAPE(nvmlDeviceGetHandleByIndex_v2);
EXPECT_SHAPE(nvmlDeviceGetName);
EXPECT_SHAPE(nvmlDeviceGetUUID);
EXPECT_SHAPE(nvmlDeviceGetPciInfo_v3);
EXPECT_SHAPE(nvmlDeviceGetCudaComputeCapability);
EXPECT_SHAPE(nvmlDeviceGetCurrPcieLinkGeneration);
EXPECT_SHAPE(nvmlDeviceGetCurrPcieLinkWidth);
EXPECT_SHAPE(nvmlDeviceGetMaxPcieLinkGeneration);
EXPECT_SHAPE(nvmlDeviceGetMaxPcieLinkWidth);
EXPECT_SHAPE(nvmlDeviceGetNvLinkState);
EXPECT_SHAPE(nvmlDeviceGetNvLinkVersion);
EXPECT_SHAPE(nvmlDeviceGetNvLinkCapability);
EXPECT_SHAPE(nvmlDeviceGetNvLinkRemotePciInfo_v2);
EXPECT_SHAPE(nvmlDeviceGetNvLinkRemoteDeviceType);
EXPECT_SHAPE(nvmlDeviceGetFieldValues);
EXPECT_SHAPE(nvmlDeviceGetTopologyCommonAncestor);
EXPECT_SHAPE(nvmlDeviceGetP2PStatus);

static_assert(nvml::kSuccess == NVML_SUCCESS && nvml::kMostLanes >= NVML_NVLINK_MAX_LINKS);
static_assert(nvml::kCapabilityValid == NVML_NVLINK_CAP_VALID);
static_assert(nvml::kLaneToSwitch == NVML_NVLINK_DEVICE_TYPE_SWITCH);
static_assert(nvml::kPeerRead == NVML_P2P_CAPS_INDEX_READ && nvml::kPeerWrite == NVML_P2P_CAPS_INDEX_WRITE);
static_assert(nvml::kFieldSpeedOfLane == NVML_FI_DEV_NVLINK_GET_SPEED);
static_assert(nvml::kFieldSpeedOfLanes == NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON);
static_assert(sizeof(nvml::PciInfo) == sizeof(nvmlPciInfo_t));
#ifdef nvmlGpuFabricInfo_v2
static_assert(nvml::kFabricInfoVersion == nvmlGpuFabricInfo_v2);
static_assert(nvml::kFabricComplete == NVML_GPU_FABRIC_STATE_COMPLETED);
static_assert(sizeof(nvml::FabricInfo) == sizeof(nvmlGpuFabricInfo_v2_t));
static_assert(offsetof(nvml::FabricInfo, cluster) == offsetof(nvmlGpuFabricInfo_v2_t, clusterUuid));
static_assert(offsetof(nvml::FabricInfo, status) == offsetof(nvmlGpuFabricInfo_v2_t, status));
static_assert(offsetof(nvml::FabricInfo, clique) == offsetof(nvmlGpuFabricInfo_v2_t, cliqueId));
static_assert(offsetof(nvml::FabricInfo, state) == offsetof(nvmlGpuFabricInfo_v2_t, state));
#endif
static_assert(offsetof(nvml::PciInfo, bus_id) == offsetof(nvmlPciInfo_t, busId));
static_assert(offsetof(nvml::PciInfo, domain) == offsetof(nvmlPciInfo_t, domain));
static_assert(sizeof(nvml::FieldValue) == sizeof(nvmlFieldValue_t));
static_assert(offsetof(nvml::FieldValue, result) == offsetof(nvmlFieldValue_t, nvmlReturn));
static_assert(offsetof(nvml::FieldValue, value) == offsetof(nvmlFieldValue_t, value));

#endif

}  // namespace
}  // namespace nvx
