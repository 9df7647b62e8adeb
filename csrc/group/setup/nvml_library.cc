#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "group/setup/nvml.h"
#include "group/setup/nvml_abi.h"
#include "group/setup/topology.h"

namespace nvx {
namespace {

/// "0000:3b:00.0", as the kernel writes it.
std::string bus_of(const nvml::PciInfo& info) {
  std::string bus(info.bus_legacy, strnlen(info.bus_legacy, sizeof info.bus_legacy));
  std::transform(bus.begin(), bus.end(), bus.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return bus;
}

/// NVLink versions by NVML's number. `lane_gb_s` is for GPUs that `nvlink_lane_gb_s()` does not know.
struct Generation {
  const char* name;
  double lane_gb_s;
};
Generation generation_of(unsigned version) {
  constexpr Generation kGenerations[] = {{"", 0},     {"1.0", 20}, {"2.0", 25}, {"2.2", 25},
                                         {"3.0", 25}, {"3.1", 25}, {"4.0", 25}, {"5.0", 50}};
  return version < std::size(kGenerations) ? kGenerations[version] : Generation{"newer than 5.0", 50};
}

class NvmlLibrary : public Nvml {
 public:
  explicit NvmlLibrary(const nvml::Api& api) : api_(api) {
    if (const nvml::Result result = api_.nvmlInit_v2())
      throw Error(Code::kSystem, std::string("nvx: NVML cannot be used: ") + api_.nvmlErrorString(result));
    unsigned count = 0;
    if (api_.nvmlDeviceGetCount_v2(&count)) count = 0;
    for (unsigned i = 0; i < count; ++i) {
      nvml::Device device = nullptr;
      if (api_.nvmlDeviceGetHandleByIndex_v2(i, &device) == nvml::kSuccess) devices_.push_back(device);
    }
  }
  ~NvmlLibrary() override { (void)api_.nvmlShutdown(); }

  std::string driver_version() override {
    char version[96] = {};
    return api_.nvmlSystemGetDriverVersion(version, sizeof version) == nvml::kSuccess ? version : "unknown";
  }

  std::vector<GpuProperties> gpus() override {
    std::vector<GpuProperties> all;
    for (nvml::Device device : devices_) all.push_back(describe(device));
    return all;
  }

  GpuPath path(int a, int b) override {
    int level = -1;
    if (api_.nvmlDeviceGetTopologyCommonAncestor(devices_[size_t(a)], devices_[size_t(b)], &level))
      return GpuPath::kUnknown;
    return level >= 0 && level <= 50 && level % 10 == 0 ? GpuPath(level / 10) : GpuPath::kUnknown;
  }

  std::string why_no_peer_access(int a, int b) override {
    constexpr const char* kReasons[] = {"",
                                        "the chipset does not support peer access",
                                        "a GPU does not support peer access",
                                        "the path through the I/O hub does not support peer access",
                                        "a registry key of the driver disables peer access",
                                        "peer access is not supported here"};
    for (const int capability : {nvml::kPeerRead, nvml::kPeerWrite}) {
      int status = -1;
      if (api_.nvmlDeviceGetP2PStatus(devices_[size_t(a)], devices_[size_t(b)], capability, &status) || status < 0 ||
          status >= int(std::size(kReasons)))
        return "the driver does not know whether peer access works";
      if (status != 0) return kReasons[status];
    }
    return "";
  }

 private:
  GpuProperties describe(nvml::Device device) {
    GpuProperties gpu;
    char text[96] = {};
    if (api_.nvmlDeviceGetName(device, text, sizeof text) == nvml::kSuccess) gpu.name = text;
    if (api_.nvmlDeviceGetUUID(device, text, sizeof text) == nvml::kSuccess) gpu.uuid = text;
    nvml::PciInfo pci{};
    if (api_.nvmlDeviceGetPciInfo_v3(device, &pci) == nvml::kSuccess) gpu.bus = bus_of(pci);
    const std::string sys = "/sys/bus/pci/devices/" + gpu.bus;
    const std::string node = read_line(sys + "/numa_node");
    gpu.numa = node.empty() ? -1 : std::atoi(node.c_str());
    gpu.cpus = read_line(sys + "/local_cpulist");
    const auto number = [&](auto query) {
      unsigned value = 0;
      return query(device, &value) == nvml::kSuccess ? int(value) : 0;
    };
    gpu.pcie_now = {number(api_.nvmlDeviceGetCurrPcieLinkGeneration), number(api_.nvmlDeviceGetCurrPcieLinkWidth)};
    gpu.pcie_most = {number(api_.nvmlDeviceGetMaxPcieLinkGeneration), number(api_.nvmlDeviceGetMaxPcieLinkWidth)};
    describe_lanes(device, gpu);
    gpu.domain = domain_of(device);
    return gpu;
  }

  /// An NVSwitch inside one host reports a fabric whose cluster UUID is zero.
  std::optional<NvlinkDomain> domain_of(nvml::Device device) {
    nvml::FabricInfo info{};
    info.version = nvml::kFabricInfoVersion;
    try {
      nvml::GetGpuFabricInfo* const query = api_.from(nvml::kGetGpuFabricInfo);
      if (query(device, &info) || info.state != nvml::kFabricComplete || info.status) return std::nullopt;
    } catch (const Error&) {  // an older driver
      return std::nullopt;
    }
    NvlinkDomain domain{{}, info.clique};
    std::ranges::copy(info.cluster, domain.cluster.begin());
    if (domain.cluster == decltype(domain.cluster){}) return std::nullopt;
    return domain;
  }

  void describe_lanes(nvml::Device device, GpuProperties& gpu) {
    double by_version = 0;
    for (unsigned lane = 0; lane < nvml::kMostLanes; ++lane) {
      unsigned valid = 0;
      int active = 0, remote = -1;
      if (api_.nvmlDeviceGetNvLinkState(device, lane, &active)) continue;
      if (!active && (api_.nvmlDeviceGetNvLinkCapability(device, lane, nvml::kCapabilityValid, &valid) || !valid))
        continue;
      NvLinkLane link{int(lane), active != 0, false, "", active ? speed_of(device, lane) : 0};
      nvml::PciInfo pci{};
      if (active && api_.nvmlDeviceGetNvLinkRemoteDeviceType(device, lane, &remote) == nvml::kSuccess)
        link.to_switch = remote == nvml::kLaneToSwitch;
      if (active && api_.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, lane, &pci) == nvml::kSuccess)
        link.bus = bus_of(pci);
      gpu.lanes.push_back(link);
      unsigned version = 0;
      if (!active || api_.nvmlDeviceGetNvLinkVersion(device, lane, &version)) continue;
      gpu.nvlink_version = generation_of(version).name;
      by_version = generation_of(version).lane_gb_s;
    }
    if (gpu.nvlink_version.empty()) return;
    int major = 0, minor = 0;
    if (api_.nvmlDeviceGetCudaComputeCapability(device, &major, &minor)) major = 0;
    gpu.lane_gb_s = nvlink_lane_gb_s(major, minor);
    for (const NvLinkLane& lane : gpu.lanes) gpu.lane_gb_s = std::max(gpu.lane_gb_s, lane.gb_s);
    // The last resort, since some drivers report a version that is too high by one.
    if (gpu.lane_gb_s <= 0) gpu.lane_gb_s = by_version;
  }

  /// The current rate of a lane in one direction; 0 if the driver does not report it.
  double speed_of(nvml::Device device, unsigned lane) {
    for (const unsigned field : {nvml::kFieldSpeedOfLane, nvml::kFieldSpeedOfLanes}) {
      nvml::FieldValue speed{};
      speed.field = field;
      speed.scope = field == nvml::kFieldSpeedOfLane ? lane : 0;
      if (api_.nvmlDeviceGetFieldValues(device, 1, &speed) == nvml::kSuccess && speed.result == nvml::kSuccess &&
          speed.value.number > 0)
        return speed.value.number / 1000.0;
    }
    return 0;
  }

  const nvml::Api api_;
  std::vector<nvml::Device> devices_;
};

}  // namespace

double nvlink_lane_gb_s(int major, int minor) {
  switch (major) {
    case 6: return 20;
    case 7: return 25;
    case 8: return minor == 0 ? 25 : 14.0625;
    case 9: return 25;
    case 10: return 50;
    default: return 0;
  }
}

std::unique_ptr<Nvml> nvml_library(const char* path) {
  const Library library(path ? path : "libnvidia-ml.so.1", "the driver is too old");
  if (!library) throw Error(Code::kSystem, "nvx: no NVIDIA driver here (" + library.error() + ")");
  return std::make_unique<NvmlLibrary>(nvml::Api{library});
}

}  // namespace nvx
