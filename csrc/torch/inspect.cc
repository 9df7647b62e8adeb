#include "torch/inspect.h"

#include "base/error.h"
#include "group/meet/gpu_topology.h"
#include "group/meet/topology.h"
#include "kernel/reduce/level.h"
#include "memory/driver/device_facts.h"
#include "memory/driver/driver_library.h"
#include "net/interfaces.h"
#include "net/ucx/ucx.h"
#include "net/ucx/ucx_search.h"

namespace nvx {
namespace {

namespace py = pybind11;

py::dict link_of(PcieLink link) {
  py::dict told;
  told["generation"] = link.generation;
  told["width"] = link.width;
  return told;
}

/// None stands for an unknown value.
py::object positive(double value) { return value > 0 ? py::object(py::float_(value)) : py::none(); }

py::list gpus_of(const GpuTopology& topology) {
  py::list gpus;
  for (const GpuFacts& gpu : topology.gpus) {
    py::dict told;
    told["name"] = gpu.name;
    told["uuid"] = gpu.uuid;
    told["bus"] = gpu.bus;
    told["numa"] = gpu.numa;
    told["cpus"] = gpu.cpus;
    told["pcie"] = link_of(gpu.pcie_now);
    told["pcie_most"] = link_of(gpu.pcie_most);
    told["nvlink_version"] = gpu.nvlink_version;
    told["nvlink_lanes"] = gpu.lanes.size();
    py::list up, gb_s;
    for (const NvLinkLane& lane : gpu.lanes) {
      if (!lane.active) continue;
      up.append(lane.number);
      gb_s.append(positive(lane.gb_s));
    }
    told["nvlink_lanes_up"] = std::move(up);
    told["nvlink_lanes_up_gb_s"] = std::move(gb_s);
    told["lane_gb_s"] = gpu.lane_gb_s;
    gpus.append(std::move(told));
  }
  return gpus;
}

void tell_speed(py::dict& told, const std::string& name, const PairSpeed& speed) {
  told[py::str(name + "_gb_s")] = positive(speed.gb_s);
  told[py::str(name + "_us")] = positive(speed.us);
  told[py::str(name + "_own_us")] = positive(speed.own_us);
}

py::list pairs_of(const GpuTopology& topology) {
  py::list pairs;
  for (const GpuPair& pair : topology.pairs) {
    py::dict told;
    told["gpus"] = py::make_tuple(pair.a, pair.b);
    told["label"] = pair.label();
    told["pcie_path"] = name(pair.path);
    told["nvswitch"] = pair.through_switch;
    told["expected_gb_s"] = pair.expected_gb_s;
    told["expected_us"] = positive(pair.expected_us);
    tell_speed(told, "measured", pair.measured);
    tell_speed(told, "measured_back", pair.measured_back);
    told["why_not_measured"] = pair.measured.why_not;
    told["why_not_measured_back"] = pair.measured_back.why_not;
    told["transport"] = pair.transport;
    told["why_not_better"] = pair.why_not_better;
    pairs.append(std::move(told));
  }
  return pairs;
}

/// The GPUs of this machine; with `measure`, also the speed of each pair, which takes at most a minute.
py::dict gpu_topology(bool measure) {
  GpuTopology topology;
  std::string unmeasured;
  {
    py::gil_scoped_release release;
    topology = look_at_gpus();
    try {
      if (measure && topology.gpus.size() > 1)
        measure_pairs(topology, driver_library(), Deadline::after(std::chrono::minutes(1)));
    } catch (const Error& error) {
      unmeasured = error.reason();
    }
  }
  py::list warnings;
  for (const GpuWarning& warning : topology.warnings) {
    py::dict told;
    told["name"] = warning.name;
    told["text"] = warning.text;
    told["command"] = warning.command;
    warnings.append(std::move(told));
  }
  py::dict told;
  told["driver"] = topology.driver;
  told["none"] = topology.none;
  told["gpus"] = gpus_of(topology);
  told["pairs"] = pairs_of(topology);
  told["warnings"] = std::move(warnings);
  told["why_not_measured"] = unmeasured;
  return told;
}

/// The driver's answer about memory that network cards can reach, or why there is none.
py::dict told_dma_bufs() {
  std::vector<DeviceFacts> found;
  std::string none;
  {
    py::gil_scoped_release release;
    try {
      found = device_facts(driver_library(), Deadline::after(std::chrono::seconds(10)));
    } catch (const Error& error) {
      none = error.reason();
    }
  }
  py::list devices;
  for (const DeviceFacts& one : found) {
    py::dict told;
    told["bus"] = one.bus;
    told["name"] = one.name;
    told["exports"] = one.exports_dma_buf;
    devices.append(std::move(told));
  }
  py::dict told;
  told["devices"] = std::move(devices);
  told["none"] = none;
  return told;
}

/// The network between hosts: the UCX library that would be loaded, and the devices that it finds.
py::dict network() {
  py::dict told;
  told["rdma_ports"] = net::rdma_ports();
  py::list found;
  for (const net::UcxCandidate& candidate : net::in_order(net::find_ucx(), net::has_rdma())) {
    py::dict one;
    one["path"] = candidate.path;
    one["version"] = candidate.version.text();
    one["rdma"] = candidate.rdma;
    found.append(std::move(one));
  }
  told["ucx_found"] = std::move(found);
  told["built_with_ucx"] = net::built_with_ucx();
  std::string link, none;
  {
    py::gil_scoped_release release;
    try {
      link = net::open_ucx()->describe();
    } catch (const std::exception& error) {
      none = error.what();
    }
  }
  told["link"] = link;
  told["cuda_memory"] = link.ends_with("CUDA memory");
  told["none"] = none;
  return told;
}

py::dict processor() {
  const Hello self = describe_self(0);
  py::dict told;
  told["host"] = std::string(self.host_name);
  told["cores"] = self.cores;
  told["l2_bytes"] = self.l2_bytes;
  told["l3_bytes"] = self.l3_bytes;
  py::list levels;
  for (const kernel::Level* level : kernel::levels()) levels.append(level->name);
  told["levels"] = std::move(levels);
  told["level"] = kernel::level().name;
  return told;
}

}  // namespace

void register_inspection(py::module_& m) {
  m.def("gpu_topology", &gpu_topology, py::arg("measure") = false);
  m.def("network", &network);
  m.def("dma_bufs", &told_dma_bufs);
  m.def("processor", &processor);
}

}  // namespace nvx
