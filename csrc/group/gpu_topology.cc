#include "group/gpu_topology.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "base/error.h"
#include "memory/apart.h"

namespace nvx {
namespace {

std::string of_gpu(int gpu) { return "GPU " + std::to_string(gpu); }

std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f" : "%.0f", value);
  return text;
}

int lanes_up(const GpuFacts& gpu) {
  return int(std::count_if(gpu.lanes.begin(), gpu.lanes.end(), [](const NvLinkLane& lane) { return lane.active; }));
}

int lanes_to(const GpuFacts& gpu, const std::string& bus) {
  return int(std::count_if(gpu.lanes.begin(), gpu.lanes.end(),
                           [&](const NvLinkLane& lane) { return lane.active && !lane.to_switch && lane.bus == bus; }));
}

int lanes_to_switch(const GpuFacts& gpu) {
  return int(std::count_if(gpu.lanes.begin(), gpu.lanes.end(),
                           [](const NvLinkLane& lane) { return lane.active && lane.to_switch; }));
}

/// Direct lanes where there are some, else as many as both have to the switch.
void join_lanes(const GpuFacts& a, const GpuFacts& b, GpuPair& pair) {
  pair.lanes = lanes_to(a, b.bus);
  if (pair.lanes == 0) {
    pair.lanes = std::min(lanes_to_switch(a), lanes_to_switch(b));
    pair.through_switch = pair.lanes > 0;
  }
  if (pair.lanes > 0) {
    pair.expected_gb_s = pair.lanes * std::min(a.lane_gb_s, b.lane_gb_s);
  } else {
    pair.expected_gb_s = std::min(pcie_gb_s(a.pcie_most), pcie_gb_s(b.pcie_most));
  }
}

void choose_transport(GpuPair& pair) {
  const std::string link = pair.lanes > 0 ? "NVLink" : "PCIe";
  if (!pair.no_peer_access.empty()) {
    pair.transport = "pinned host memory";
    pair.why_not_better = "no GPU memory over " + link + ": " + pair.no_peer_access;
  } else {
    pair.transport = "GPU memory over " + link;
    if (pair.lanes == 0) pair.why_not_better = "no NVLink is up between them";
  }
}

void warn_of_lanes(GpuTopology& topology) {
  std::map<std::string, int> most;  // lanes that are up, by model
  for (const GpuFacts& gpu : topology.gpus) most[gpu.name] = std::max(most[gpu.name], lanes_up(gpu));
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuFacts& gpu = topology.gpus[i];
    const int up = lanes_up(gpu), all = int(gpu.lanes.size()), best = most[gpu.name];
    if (up == best && (up == 0 || up * 2 > all)) continue;
    std::string text =
        of_gpu(int(i)) + " (" + gpu.name + ") has " + std::to_string(up) + " of " + std::to_string(all) + " NVLinks up";
    if (up < best) text += ", another one of its kind " + std::to_string(best);
    topology.warnings.push_back(
        {up * 2 <= all ? "nvlink-half" : "nvlink-lanes-down", text, "nvidia-smi nvlink -s -i " + std::to_string(i)});
  }
  int most_between = 0;
  for (const GpuPair& pair : topology.pairs) most_between = std::max(most_between, pair.lanes);
  for (const GpuPair& pair : topology.pairs) {
    const GpuFacts &a = topology.gpus[size_t(pair.a)], &b = topology.gpus[size_t(pair.b)];
    if (pair.lanes == 0 || pair.lanes * 2 > most_between || a.name != b.name) continue;
    topology.warnings.push_back({"nvlink-pair-half",
                                 of_gpu(pair.a) + " and " + of_gpu(pair.b) + " are joined by " +
                                     std::to_string(pair.lanes) + " NVLinks, other pairs here by " +
                                     std::to_string(most_between),
                                 "nvidia-smi topo -m"});
  }
}

void warn_of_pcie(GpuTopology& topology) {
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuFacts& gpu = topology.gpus[i];
    if (gpu.pcie_now.width == 0 || gpu.pcie_now.width * 2 > gpu.pcie_most.width) continue;
    topology.warnings.push_back({"pcie-width-half",
                                 of_gpu(int(i)) + " (" + gpu.name + ") has a PCIe link of x" +
                                     std::to_string(gpu.pcie_now.width) + " where it could have x" +
                                     std::to_string(gpu.pcie_most.width),
                                 "nvidia-smi -q -d PCIE -i " + std::to_string(i)});
  }
}

void warn_of_speed(GpuTopology& topology) {
  for (const GpuPair& pair : topology.pairs) {
    const double got = pair.measured.gb_s;
    if (got <= 0 || pair.expected_gb_s <= 0 || got * 2 > pair.expected_gb_s) continue;
    topology.warnings.push_back({"bandwidth-half",
                                 of_gpu(pair.a) + " writes to " + of_gpu(pair.b) + " at " + rounded(got) +
                                     " GB/s, where " + pair.label() + " should give " + rounded(pair.expected_gb_s),
                                 pair.lanes > 0 ? "nvidia-smi nvlink -s" : "nvidia-smi topo -m"});
  }
}

std::string exactly(double us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", us);
  return text;
}

void warn_of_latency(GpuTopology& topology) {
  for (const GpuPair& pair : topology.pairs) {
    if (pair.expected_us <= 0 || pair.measured.us < pair.expected_us * 2) continue;
    topology.warnings.push_back({"latency-high",
                                 of_gpu(pair.a) + " has written a little to " + of_gpu(pair.b) + " after " +
                                     exactly(pair.measured.us) + " us, where " + pair.label() + " should take " +
                                     exactly(pair.expected_us) + ": within " + of_gpu(pair.a) + " it takes " +
                                     exactly(pair.measured.own_us),
                                 pair.lanes > 0 ? "nvidia-smi nvlink -s" : "nvidia-smi topo -m"});
  }
}

void judge(GpuTopology& topology) {
  topology.warnings.clear();
  for (GpuPair& pair : topology.pairs) {
    choose_transport(pair);
    pair.expected_us = pair.measured.own_us > 0 ? pair.measured.own_us + way_us(pair) : 0;
  }
  warn_of_lanes(topology);
  warn_of_pcie(topology);
  warn_of_speed(topology);
  warn_of_latency(topology);
}

/// "0000:3b:00.0" of NVML may be "00000000:3B:00.0" elsewhere.
std::string key_of(std::string bus) {
  std::transform(bus.begin(), bus.end(), bus.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return bus.size() > 12 ? bus.substr(bus.size() - 12) : bus;
}

/// The driver's devices: CUDA_VISIBLE_DEVICES may hide some, and change their order.
std::map<std::string, int> by_bus(DeviceDriver& driver) {
  std::map<std::string, int> devices;
  int count = 0;
  if (driver.count(&count) != 0) count = 0;
  for (int device = 0; device < count; ++device) {
    DeviceFacts facts;
    if (driver.describe(device, &facts) == 0) devices[key_of(facts.bus)] = device;
  }
  return devices;
}

}  // namespace

const char* name(GpuPath path) {
  constexpr const char* kNames[] = {"X", "PIX", "PXB", "PHB", "NODE", "SYS", "?"};
  return kNames[int(path)];
}

double pcie_gb_s(PcieLink link) {
  constexpr double kLane[] = {0, 0.25, 0.5, 0.985, 1.969, 3.938, 7.563};
  if (link.generation <= 0) return 0;
  return link.width * kLane[std::min<size_t>(size_t(link.generation), std::size(kLane) - 1)];
}

double way_us(const GpuPair& pair) {
  constexpr double kNvLink = 1, kNvSwitch = 1.5;
  constexpr double kPcie[] = {0, 1.5, 2, 2.5, 3, 4, 4};  // by GpuPath; of an unknown one the longest
  if (pair.lanes > 0) return pair.through_switch ? kNvSwitch : kNvLink;
  return kPcie[int(pair.path)];
}

std::string GpuPair::label() const { return lanes > 0 ? "NV" + std::to_string(lanes) : nvx::name(path); }

const GpuPair& GpuTopology::pair(int a, int b) const {
  const int low = std::min(a, b), high = std::max(a, b);
  const auto same = [&](const GpuPair& pair) { return pair.a == low && pair.b == high; };
  return *std::find_if(pairs.begin(), pairs.end(), same);
}

GpuTopology look_at_gpus(Nvml& nvml) {
  GpuTopology topology;
  topology.driver = nvml.driver_version();
  topology.gpus = nvml.gpus();
  if (topology.gpus.empty()) topology.none = "the NVIDIA driver " + topology.driver + " sees no GPU";
  const int count = int(topology.gpus.size());
  for (int a = 0; a < count; ++a) {
    for (int b = a + 1; b < count; ++b) {
      GpuPair pair;
      pair.a = a;
      pair.b = b;
      pair.path = nvml.path(a, b);
      pair.no_peer_access = nvml.why_no_peer_access(a, b);
      join_lanes(topology.gpus[size_t(a)], topology.gpus[size_t(b)], pair);
      topology.pairs.push_back(std::move(pair));
    }
  }
  judge(topology);
  return topology;
}

GpuTopology look_at_gpus() {
  try {
    return look_at_gpus(*nvml_library());
  } catch (const Error& error) {
    GpuTopology nothing;
    nothing.none = error.reason();
    return nothing;
  }
}

void measure_pairs(GpuTopology& topology, const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline,
                   std::chrono::milliseconds each, size_t large_copy) {
  const auto soon = [&] {
    const Deadline own = Deadline::after(each);
    return Deadline{own.start, std::min(own.end, deadline.end)};
  };
  std::map<std::string, int> devices;
  std::string none;
  try {
    using Devices = std::map<std::string, int>;
    devices = demand_apart<Devices>("the driver, asked for its GPUs,", soon(), [driver] { return by_bus(*driver); });
  } catch (const Error& error) {
    none = error.reason();
  }
  for (GpuPair& pair : topology.pairs) {
    const auto a = devices.find(key_of(topology.gpus[size_t(pair.a)].bus));
    const auto b = devices.find(key_of(topology.gpus[size_t(pair.b)].bus));
    std::string& why = pair.measured.why_not;
    if (!none.empty()) {
      why = none;
    } else if (a == devices.end() || b == devices.end()) {
      why = "CUDA_VISIBLE_DEVICES hides one of them";
    } else if (deadline.passed(Clock::now())) {
      why = "not tried: the others had taken all the time, " + how_long(deadline);
    } else {
      pair.measured = measure_pair(driver, a->second, b->second, soon(), large_copy);
      if (!why.empty()) why = of_gpu(pair.a) + " to " + of_gpu(pair.b) + ": " + why;
    }
  }
  judge(topology);
}

}  // namespace nvx
