#include "group/setup/gpu_topology.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include "base/error.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

std::string of_gpu(int gpu) { return "GPU " + std::to_string(gpu); }

std::string rounded(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f" : "%.0f", value);
  return text;
}

int lanes_up(const GpuProperties& gpu) { return int(std::ranges::count(gpu.lanes, true, &NvLinkLane::active)); }

int lanes_to(const GpuProperties& gpu, const std::string& bus) {
  return int(std::ranges::count_if(
      gpu.lanes, [&](const NvLinkLane& lane) { return lane.active && !lane.to_switch && lane.bus == bus; }));
}

/// In a VM the driver gives a switch the bus "ffff...", as the VM has no such device, and may not know its type.
int lanes_to_switch(const GpuProperties& gpu) {
  return int(std::ranges::count_if(gpu.lanes, [](const NvLinkLane& lane) {
    return lane.active && (lane.to_switch || lane.bus.starts_with("ffff"));
  }));
}

/// Counts direct lanes if there are any, otherwise the lanes that both have to the switch.
void join_lanes(const GpuProperties& a, const GpuProperties& b, GpuPair& pair) {
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
  for (const GpuProperties& gpu : topology.gpus) most[gpu.name] = std::max(most[gpu.name], lanes_up(gpu));
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuProperties& gpu = topology.gpus[i];
    const int up = lanes_up(gpu), all = int(gpu.lanes.size()), best = most[gpu.name];
    if (up == best && (up == 0 || up * 2 > all)) continue;
    std::string text =
        of_gpu(int(i)) + " (" + gpu.name + ") has " + std::to_string(up) + " of " + std::to_string(all) + " NVLinks up";
    if (up < best) text += ", another GPU of this model " + std::to_string(best);
    topology.warnings.push_back(
        {up * 2 <= all ? "nvlink-half" : "nvlink-lanes-down", text, "nvidia-smi nvlink -s -i " + std::to_string(i)});
  }
  int most_between = 0;
  for (const GpuPair& pair : topology.pairs) most_between = std::max(most_between, pair.lanes);
  for (const GpuPair& pair : topology.pairs) {
    const GpuProperties &a = topology.gpus[size_t(pair.a)], &b = topology.gpus[size_t(pair.b)];
    if (pair.lanes == 0 || pair.lanes * 2 > most_between || a.name != b.name) continue;
    topology.warnings.push_back({"nvlink-pair-half",
                                 of_gpu(pair.a) + " and " + of_gpu(pair.b) + " are joined by " +
                                     std::to_string(pair.lanes) + " NVLinks, other pairs here by " +
                                     std::to_string(most_between),
                                 "nvidia-smi topo -m"});
  }
}

/// Warns of lanes that are up, but at half the nominal rate or little more.
void warn_of_lane_rates(GpuTopology& topology) {
  constexpr double kLeast = 0.6;
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuProperties& gpu = topology.gpus[i];
    std::string slow;
    double slowest = gpu.lane_gb_s;
    for (const NvLinkLane& lane : gpu.lanes) {
      if (!lane.active || lane.gb_s <= 0 || lane.gb_s > kLeast * gpu.lane_gb_s) continue;
      slow += (slow.empty() ? "" : ", ") + std::to_string(lane.number);
      slowest = std::min(slowest, lane.gb_s);
    }
    if (slow.empty()) continue;
    topology.warnings.push_back({"nvlink-rate-half",
                                 of_gpu(int(i)) + " (" + gpu.name + ") has NVLinks at " + rounded(slowest) +
                                     " GB/s instead of " + rounded(gpu.lane_gb_s) + " GB/s: " + slow,
                                 "nvidia-smi nvlink -s -i " + std::to_string(i)});
  }
}

void warn_of_pcie(GpuTopology& topology) {
  for (size_t i = 0; i < topology.gpus.size(); ++i) {
    const GpuProperties& gpu = topology.gpus[i];
    if (gpu.pcie_now.width == 0 || gpu.pcie_now.width * 2 > gpu.pcie_most.width) continue;
    topology.warnings.push_back({"pcie-width-half",
                                 of_gpu(int(i)) + " (" + gpu.name + ") has a PCIe link of x" +
                                     std::to_string(gpu.pcie_now.width) + " instead of x" +
                                     std::to_string(gpu.pcie_most.width),
                                 "nvidia-smi -q -d PCIE -i " + std::to_string(i)});
  }
}

/// The measurement of one direction of a pair.
struct Way {
  int from, to;
  const PairSpeed& speed;
};
std::array<Way, 2> ways_of(const GpuPair& pair) {
  return {Way{pair.a, pair.b, pair.measured}, Way{pair.b, pair.a, pair.measured_back}};
}

const char* command_for(const GpuPair& pair) { return pair.lanes > 0 ? "nvidia-smi nvlink -s" : "nvidia-smi topo -m"; }

void warn_of_speed(GpuTopology& topology) {
  for (const GpuPair& pair : topology.pairs) {
    for (const Way& way : ways_of(pair)) {
      const double got = way.speed.gb_s;
      if (got <= 0 || pair.expected_gb_s <= 0 || got * 2 > pair.expected_gb_s) continue;
      topology.warnings.push_back({"bandwidth-half",
                                   of_gpu(way.from) + " writes to " + of_gpu(way.to) + " at " + rounded(got) +
                                       " GB/s instead of " + rounded(pair.expected_gb_s) + " GB/s over " + pair.label(),
                                   command_for(pair)});
    }
  }
}

std::string exactly(double us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", us);
  return text;
}

double expected_us(const GpuPair& pair, const PairSpeed& speed) {
  return speed.own_us > 0 ? speed.own_us + remote_write_us(pair) : 0;
}

void warn_of_latency(GpuTopology& topology) {
  for (const GpuPair& pair : topology.pairs) {
    for (const Way& way : ways_of(pair)) {
      const double expected = expected_us(pair, way.speed);
      if (expected <= 0 || way.speed.us < expected * 2) continue;
      topology.warnings.push_back({"latency-high",
                                   "a small write from " + of_gpu(way.from) + " to " + of_gpu(way.to) + " takes " +
                                       exactly(way.speed.us) + " us instead of " + exactly(expected) + " us over " +
                                       pair.label() + "; within " + of_gpu(way.from) + " it takes " +
                                       exactly(way.speed.own_us) + " us",
                                   command_for(pair)});
    }
  }
}

void assess(GpuTopology& topology) {
  topology.warnings.clear();
  for (GpuPair& pair : topology.pairs) {
    choose_transport(pair);
    pair.expected_us = expected_us(pair, pair.measured);
  }
  warn_of_lanes(topology);
  warn_of_lane_rates(topology);
  warn_of_pcie(topology);
  warn_of_speed(topology);
  warn_of_latency(topology);
}

PairSpeed unmeasured(const std::string& why) {
  PairSpeed speed;
  speed.why_not = why;
  return speed;
}

/// The driver's devices by bus. CUDA_VISIBLE_DEVICES may hide some and change their order.
std::map<std::string, int> by_bus(DeviceDriver& driver) {
  std::map<std::string, int> devices;
  int count = 0;
  if (driver.count(&count) != 0) count = 0;
  for (int device = 0; device < count; ++device) {
    DeviceProperties properties;
    if (driver.describe(device, &properties) == 0) devices[bus_key(properties.bus)] = device;
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

double remote_write_us(const GpuPair& pair) {
  constexpr double kNvLink = 1, kNvSwitch = 1.5;
  constexpr double kPcie[] = {0, 1.5, 2, 2.5, 3, 4, 4};  // by GpuPath; the longest for an unknown one
  if (pair.lanes > 0) return pair.through_switch ? kNvSwitch : kNvLink;
  return kPcie[int(pair.path)];
}

std::string GpuPair::label() const { return lanes > 0 ? "NV" + std::to_string(lanes) : nvx::name(path); }

std::string bus_key(std::string bus) {
  std::transform(bus.begin(), bus.end(), bus.begin(), [](unsigned char c) { return char(std::tolower(c)); });
  return bus.size() > 12 ? bus.substr(bus.size() - 12) : bus;
}

bool joined_by_nvlink(const GpuProperties& a, const GpuProperties& b) {
  return lanes_to(a, b.bus) > 0 || (lanes_to_switch(a) > 0 && lanes_to_switch(b) > 0) ||
         (a.domain && a.domain == b.domain);
}

std::string text_of_uuid(const std::array<uint8_t, 16>& uuid) {
  std::string text = "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    char byte[4];
    std::snprintf(byte, sizeof byte, "%02x", unsigned(uuid[i]));
    text += (i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(byte);
  }
  return text;
}

std::vector<GpuProperties> gpus_here() {
  using Gpus = std::vector<GpuProperties>;
  static auto* const kKnown = new CreatedOnce<Gpus>;
  return kKnown->get("querying NVML for its GPUs", Deadline::after(std::chrono::seconds(10)),
                     [] { return std::make_unique<Gpus>(nvml_library()->gpus()); });
}

GpuTopology query_gpus(Nvml& nvml) {
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
  assess(topology);
  return topology;
}

GpuTopology query_gpus() {
  return query_gpus([] { return nvml_library(); }, std::chrono::seconds(10));
}

GpuTopology query_gpus(const std::function<std::unique_ptr<Nvml>()>& open, std::chrono::milliseconds timeout) {
  try {
    return call_or_throw<GpuTopology>("querying NVML for the GPUs", Deadline::after(timeout),
                                      [open] { return query_gpus(*open()); });
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
    devices = call_or_throw<Devices>("querying the driver for its GPUs", soon(), [driver] { return by_bus(*driver); });
  } catch (const Error& error) {
    none = error.reason();
  }
  for (GpuPair& pair : topology.pairs) {
    const auto a = devices.find(bus_key(topology.gpus[size_t(pair.a)].bus));
    const auto b = devices.find(bus_key(topology.gpus[size_t(pair.b)].bus));
    const auto measured_way = [&](int from, int to, auto device, auto device_to) {
      if (!none.empty()) return unmeasured(none);
      if (a == devices.end() || b == devices.end()) return unmeasured("CUDA_VISIBLE_DEVICES hides one of them");
      if (deadline.passed(Clock::now()))
        return unmeasured("not measured, the other pairs used up the time of " + how_long(deadline));
      PairSpeed speed = measure_pair(driver, device->second, device_to->second, soon(), large_copy);
      if (!speed.why_not.empty()) speed.why_not = of_gpu(from) + " to " + of_gpu(to) + ": " + speed.why_not;
      return speed;
    };
    pair.measured = measured_way(pair.a, pair.b, a, b);
    // A direction usually fails by hanging, so the other one would hang as long.
    pair.measured_back =
        pair.measured.why_not.empty() ? measured_way(pair.b, pair.a, b, a) : unmeasured(pair.measured.why_not);
  }
  assess(topology);
}

}  // namespace nvx
