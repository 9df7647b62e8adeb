#include "torch/python/inspect.h"

#include <cstdio>
#include <optional>

#include "base/error.h"
#include "group/setup/gpu_topology.h"
#include "group/setup/topology.h"
#include "kernel/reduce/level.h"
#include "memory/driver/driver_library.h"
#include "net/interfaces.h"
#include "net/ucx/ucx.h"
#include "net/ucx/ucx_search.h"

namespace nvx {
namespace {

namespace py = pybind11;
using namespace py::literals;

py::dict link_of(PcieLink link) { return py::dict("generation"_a = link.generation, "width"_a = link.width); }

/// "07070707070707070707070707070707, clique 2"; empty without one.
std::string name_of_domain(const std::optional<NvlinkDomain>& domain) {
  if (!domain) return "";
  std::string text;
  char digits[3];
  for (const uint8_t byte : domain->cluster) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text + ", clique " + std::to_string(domain->clique);
}

/// None stands for an unknown value.
py::object positive(double value) { return value > 0 ? py::object(py::float_(value)) : py::none(); }

py::list gpus_of(const GpuTopology& topology) {
  py::list gpus;
  for (const GpuProperties& gpu : topology.gpus) {
    py::list up, gb_s;
    for (const NvLinkLane& lane : gpu.lanes) {
      if (!lane.active) continue;
      up.append(lane.number);
      gb_s.append(positive(lane.gb_s));
    }
    gpus.append(py::dict("name"_a = gpu.name, "uuid"_a = gpu.uuid, "bus"_a = gpu.bus, "numa"_a = gpu.numa,
                         "cpus"_a = gpu.cpus, "pcie"_a = link_of(gpu.pcie_now), "pcie_most"_a = link_of(gpu.pcie_most),
                         "nvlink_version"_a = gpu.nvlink_version, "nvlink_lanes"_a = gpu.lanes.size(),
                         "nvlink_lanes_up"_a = up, "nvlink_lanes_up_gb_s"_a = gb_s, "lane_gb_s"_a = gpu.lane_gb_s,
                         "nvlink_domain"_a = name_of_domain(gpu.domain)));
  }
  return gpus;
}

void put_speed(py::dict& pair, const std::string& name, const PairSpeed& speed) {
  pair[py::str(name + "_gb_s")] = positive(speed.gb_s);
  pair[py::str(name + "_us")] = positive(speed.us);
  pair[py::str(name + "_own_us")] = positive(speed.own_us);
}

py::list pairs_of(const GpuTopology& topology) {
  py::list pairs;
  for (const GpuPair& pair : topology.pairs) {
    py::dict entry =
        py::dict("gpus"_a = py::make_tuple(pair.a, pair.b), "label"_a = pair.label(), "pcie_path"_a = name(pair.path),
                 "nvswitch"_a = pair.through_switch, "expected_gb_s"_a = pair.expected_gb_s,
                 "expected_us"_a = positive(pair.expected_us), "why_not_measured"_a = pair.measured.why_not,
                 "why_not_measured_back"_a = pair.measured_back.why_not, "transport"_a = pair.transport,
                 "why_not_better"_a = pair.why_not_better);
    put_speed(entry, "measured", pair.measured);
    put_speed(entry, "measured_back", pair.measured_back);
    pairs.append(std::move(entry));
  }
  return pairs;
}

/// The GPUs of this machine; with `measure`, also the speed of each pair, which takes at most a minute.
py::dict gpu_topology(bool measure) {
  GpuTopology topology;
  std::string unmeasured;
  {
    py::gil_scoped_release release;
    topology = query_gpus();
    try {
      if (measure && topology.gpus.size() > 1)
        measure_pairs(topology, driver_library(), Deadline::after(std::chrono::minutes(1)));
    } catch (const Error& error) {
      unmeasured = error.reason();
    }
  }
  py::list warnings;
  for (const GpuWarning& warning : topology.warnings) {
    warnings.append(py::dict("name"_a = warning.name, "text"_a = warning.text, "command"_a = warning.command));
  }
  return py::dict("driver"_a = topology.driver, "none"_a = topology.none, "gpus"_a = gpus_of(topology),
                  "pairs"_a = pairs_of(topology), "warnings"_a = warnings, "why_not_measured"_a = unmeasured);
}

/// The driver's answer about memory that network cards can reach, or why there is none.
py::dict dma_bufs() {
  std::vector<DeviceProperties> found;
  std::string none;
  {
    py::gil_scoped_release release;
    try {
      found = device_properties(driver_library(), Deadline::after(std::chrono::seconds(10)));
    } catch (const Error& error) {
      none = error.reason();
    }
  }
  py::list devices;
  for (const DeviceProperties& one : found) {
    devices.append(py::dict("bus"_a = one.bus, "name"_a = one.name, "exports"_a = one.exports_dma_buf));
  }
  return py::dict("devices"_a = devices, "none"_a = none);
}

/// The network between hosts: the UCX library that would be loaded, and the devices that it finds.
py::dict network() {
  py::list found;
  for (const net::UcxCandidate& candidate : net::in_order(net::find_ucx(), net::has_rdma())) {
    found.append(
        py::dict("path"_a = candidate.path, "version"_a = candidate.version.text(), "rdma"_a = candidate.rdma));
  }
  std::string link, none, why_host_memory;
  {
    py::gil_scoped_release release;
    try {
      const auto opened = net::open_ucx();
      link = opened->describe(), why_host_memory = opened->use_device_memory({});
    } catch (const std::exception& error) {
      none = error.what();
    }
  }
  return py::dict("rdma_ports"_a = net::rdma_ports(), "ucx_found"_a = found, "built_with_ucx"_a = net::built_with_ucx(),
                  "link"_a = link, "why_host_memory"_a = why_host_memory, "none"_a = none);
}

py::dict processor() {
  const Hello self = describe_self(0);
  py::list levels;
  for (const kernel::Level* level : kernel::levels()) levels.append(level->name);
  return py::dict("host"_a = std::string(self.host_name), "cores"_a = self.cores, "l2_bytes"_a = self.l2_bytes,
                  "l3_bytes"_a = self.l3_bytes, "levels"_a = levels, "level"_a = kernel::level().name);
}

}  // namespace

void register_inspection(py::module_& m) {
  m.def("gpu_topology", &gpu_topology, py::arg("measure") = false);
  m.def("network", &network);
  m.def("dma_bufs", &dma_bufs);
  m.def("processor", &processor);
}

}  // namespace nvx
