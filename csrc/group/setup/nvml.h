#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace nvx {

/// The destination of an NVLink lane.
struct NvLinkLane {
  int number = 0;  ///< as in `nvidia-smi nvlink`
  bool active = false;
  bool to_switch = false;
  std::string bus;  ///< of the device at its other end, if NVML reports it
  double gb_s = 0;  ///< its current rate in one direction; 0 if NVML does not report it
};

struct PcieLink {
  int generation = 0;
  int width = 0;
};

/// The connection of two GPUs without NVLink, as in `nvidia-smi topo -m`. A tenth of NVML's numbers.
enum class GpuPath { kSame, kPix, kPxb, kPhb, kNode, kSys, kUnknown };
const char* name(GpuPath path);

/// An NVLink domain: the GPUs that reach each other through one NVLink fabric, on one host or on several.
struct NvlinkDomain {
  std::array<uint8_t, 16> cluster{};
  uint32_t clique = 0;
  bool operator==(const NvlinkDomain&) const = default;
};

struct GpuProperties {
  std::string uuid;
  std::string name;
  std::string bus;  ///< "0000:3b:00.0"
  int numa = -1;
  std::string cpus;   ///< "0-31", the near ones
  PcieLink pcie_now;  ///< an idle GPU shows a lower generation than its maximum
  PcieLink pcie_most;
  std::vector<NvLinkLane> lanes;       ///< the lanes that the GPU has, up or not
  std::string nvlink_version;          ///< "4.0"; empty without NVLink
  double lane_gb_s = 0;                ///< the nominal rate of one lane of this GPU, in one direction
  std::optional<NvlinkDomain> domain;  ///< if the GPU has joined a fabric that may span hosts
};

/// The GPUs of this machine according to NVML: libnvidia-ml, or a test's.
class Nvml {
 public:
  virtual ~Nvml() = default;
  virtual std::string driver_version() = 0;
  virtual std::vector<GpuProperties> gpus() = 0;
  virtual GpuPath path(int a, int b) = 0;
  /// The reason why the driver refuses one to access the other's memory; empty if it does not.
  virtual std::string why_no_peer_access(int a, int b) = 0;
};

/// The nominal rate of an NVLink lane in one direction, by the compute capability of its GPU; 0 if not known. The rate
/// that a GPU reports is its current one: for a lane that trained at half its rate it is half.
double nvlink_lane_gb_s(int major, int minor);

/// libnvidia-ml, which stays loaded. Throws Error if it is missing or unusable.
/// `path`: overrides the system's; for tests.
std::unique_ptr<Nvml> nvml_library(const char* path = nullptr);

}  // namespace nvx
