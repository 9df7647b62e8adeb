#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/setup/nvml.h"
#include "memory/gpu/device_measure.h"

namespace nvx {

/// A connection below its expected performance, and the command that shows it.
struct GpuWarning {
  std::string name;  ///< "nvlink-half"
  std::string text;
  std::string command;
};

struct GpuPair {
  int a = 0;
  int b = 0;
  GpuPath path = GpuPath::kUnknown;
  int lanes = 0;  ///< NVLink lanes that are up between them
  bool through_switch = false;
  std::string no_peer_access;  ///< the reason why the driver refuses it; empty if it does not
  double expected_gb_s = 0;    ///< in one direction; 0: not known
  double expected_us = 0;      ///< of a small copy: that within `a`, plus `remote_write_us()`; 0: not measured
  PairSpeed measured;          ///< from a to b; all zero if not measured
  PairSpeed measured_back;     ///< from b to a

  std::string transport;       ///< the transport by which their ranks would share memory
  std::string why_not_better;  ///< empty if there is no better one

  std::string label() const;  ///< as in `nvidia-smi topo -m`: NV18, PIX, SYS ...
};

/// The GPUs of this machine and their connections.
struct GpuTopology {
  std::string driver;
  std::vector<GpuProperties> gpus;
  std::vector<GpuPair> pairs;  ///< a < b, in order
  std::vector<GpuWarning> warnings;
  std::string none;  ///< the reason why there are no GPUs; empty if there are
};

/// A bus in one spelling: NVML and the driver differ in the case and in the digits of the PCI domain.
std::string bus_key(std::string bus);

/// Whether NVLink joins the two: by lanes of their own, through a switch, or through the fabric of a domain.
bool joined_by_nvlink(const GpuProperties& a, const GpuProperties& b);
/// The UUID as NVML writes it.
std::string text_of_uuid(const std::array<uint8_t, 16>& uuid);
/// NVML's GPUs of this machine, as they were at the first query of the process. Throws Error if there are none. May
/// hang.
std::vector<GpuProperties> gpus_here();

/// NVML's data, and the connections and warnings derived from it.
GpuTopology query_gpus(Nvml& nvml);
/// The same for this machine. `none` has the reason if there is no driver or no GPU, or if the driver does not answer
/// in time; these cases do not throw.
GpuTopology query_gpus();
/// The same for the Nvml that `open` returns, within `timeout`.
GpuTopology query_gpus(const std::function<std::unique_ptr<Nvml>()>& open, std::chrono::milliseconds timeout);

/// Measures every pair and derives the warnings again. Devices of the driver are matched by bus. Each direction of a
/// pair gets `each`, and all end soon after the deadline at the latest; `why_not` states why a direction was not
/// measured.
void measure_pairs(GpuTopology& topology, const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline,
                   std::chrono::milliseconds each = std::chrono::seconds(10), size_t large_copy = size_t(64) << 20);

/// The rate of a PCIe link in one direction; 0 if not known.
double pcie_gb_s(PcieLink link);

/// The extra time of a small write to the other GPU's memory over one to its own. A rule of thumb by the kind of
/// connection, not a measurement.
double remote_write_us(const GpuPair& pair);

}  // namespace nvx
