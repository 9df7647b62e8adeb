#pragma once

#include <memory>
#include <string>
#include <vector>

namespace nvx {

/// Where a lane of NVLink goes.
struct NvLinkLane {
  int number = 0;  ///< as `nvidia-smi nvlink` counts
  bool active = false;
  bool to_switch = false;
  std::string bus;  ///< of the device at its other end, where that is told
  double gb_s = 0;  ///< that it runs at, in one direction; 0 where that is not told
};

struct PcieLink {
  int generation = 0;
  int width = 0;
};

/// How two GPUs are joined without NVLink, as `nvidia-smi topo -m` has it.
enum class GpuPath { kSame, kPix, kPxb, kPhb, kNode, kSys, kUnknown };
const char* name(GpuPath path);

struct GpuFacts {
  std::string uuid;
  std::string name;
  std::string bus;  ///< "0000:3b:00.0"
  int numa = -1;
  std::string cpus;   ///< "0-31", those that are near
  PcieLink pcie_now;  ///< an idle GPU shows a lower generation than it can
  PcieLink pcie_most;
  std::vector<NvLinkLane> lanes;  ///< that the GPU has, whether they are up or not
  std::string nvlink_version;     ///< "4.0"; empty without NVLink
  double lane_gb_s = 0;           ///< what one lane of such a GPU should give in one direction
};

/// What NVML tells of the GPUs of this machine: libnvidia-ml, or a test's.
class Nvml {
 public:
  virtual ~Nvml() = default;
  virtual std::string driver_version() = 0;
  virtual std::vector<GpuFacts> gpus() = 0;
  virtual GpuPath path(int a, int b) = 0;
  /// Why the driver would not let one read and write the other's memory; empty where it would.
  virtual std::string why_no_peer_access(int a, int b) = 0;
};

/// What a lane of NVLink gives in one direction, by the compute capability of the GPU that it belongs to; 0 where that
/// is not known. What a GPU says of its own lanes is no measure for them: a lane that trained at half its rate says so.
double nvlink_lane_gb_s(int major, int minor);

/// libnvidia-ml, which stays loaded. Throws Error where there is none, or it cannot be used.
/// path: instead of the system's; for tests.
std::unique_ptr<Nvml> nvml_library(const char* path = nullptr);

}  // namespace nvx
