#pragma once

#include <map>
#include <utility>

#include "group/setup/nvml.h"

namespace nvx::test {

/// GPUs as a test describes them.
class FakeNvml : public Nvml {
 public:
  std::string driver_version() override { return "580.1"; }
  std::vector<GpuProperties> gpus() override { return all; }
  GpuPath path(int a, int b) override { return paths.count({a, b}) ? paths[{a, b}] : GpuPath::kNode; }
  std::string why_no_peer_access(int a, int b) override { return refused[{a, b}]; }

  /// A GPU with links to a switch, of which the first few are up.
  GpuProperties& add(const std::string& name, int up = 0, int lanes = 0) {
    GpuProperties gpu;
    gpu.name = name;
    gpu.uuid = "GPU-" + std::to_string(all.size());
    gpu.bus = "0000:0" + std::to_string(all.size() + 1) + ":00.0";
    gpu.pcie_now = {1, 16};
    gpu.pcie_most = {5, 16};
    for (int lane = 0; lane < lanes; ++lane) gpu.lanes.push_back({lane, lane < up, true, "0000:a0:00.0"});
    if (lanes) gpu.nvlink_version = "4.0", gpu.lane_gb_s = 25;
    all.push_back(gpu);
    return all.back();
  }
  /// Bridges: links from one GPU to the other.
  void bridge(int a, int b, int lanes) {
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
      for (int lane = 0; lane < lanes; ++lane)
        all[size_t(from)].lanes.push_back({lane, true, false, all[size_t(to)].bus});
      all[size_t(from)].nvlink_version = "3.0";
      all[size_t(from)].lane_gb_s = 25;
    }
  }

  std::vector<GpuProperties> all;
  std::map<std::pair<int, int>, GpuPath> paths;
  std::map<std::pair<int, int>, std::string> refused;
};

}  // namespace nvx::test
