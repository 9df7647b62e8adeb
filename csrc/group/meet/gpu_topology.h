#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/meet/nvml.h"
#include "memory/gpu/device_measure.h"

namespace nvx {

/// What is joined less well than it should be, and the command that shows it.
struct GpuWarning {
  std::string name;  ///< "nvlink-half"
  std::string text;
  std::string command;
};

struct GpuPair {
  int a = 0;
  int b = 0;
  GpuPath path = GpuPath::kUnknown;
  int lanes = 0;  ///< of NVLink that are up between them
  bool through_switch = false;
  std::string no_peer_access;  ///< why the driver refuses it; empty where it does not
  double expected_gb_s = 0;    ///< in one direction; 0: not known
  double expected_us = 0;      ///< of a small copy, by what one within a takes and way_us; 0: nobody has measured that
  PairSpeed measured;          ///< from a to b; all zero where nobody has measured
  PairSpeed measured_back;     ///< from b to a

  std::string transport;       ///< how their ranks would share memory
  std::string why_not_better;  ///< empty where nothing is

  std::string label() const;  ///< as `nvidia-smi topo -m` writes it: NV18, PIX, SYS ...
};

/// The GPUs of this machine and how they are joined.
struct GpuTopology {
  std::string driver;
  std::vector<GpuFacts> gpus;
  std::vector<GpuPair> pairs;  ///< a < b, in order
  std::vector<GpuWarning> warnings;
  std::string none;  ///< why there are no GPUs here; empty where there are

  const GpuPair& pair(int a, int b) const;
};

/// What NVML tells, and what follows from it.
GpuTopology look_at_gpus(Nvml& nvml);
/// Of this machine; without a driver, without GPUs, or where the driver does not answer in time, `none` says why. Never
/// throws for want of them.
GpuTopology look_at_gpus();
/// The same of what is opened, for so long at most.
GpuTopology look_at_gpus(const std::function<std::unique_ptr<Nvml>()>& open, std::chrono::milliseconds patience);

/// Measures every pair, the devices of the driver being found by their buses, and judges anew. Each way of a pair has
/// its time, and all together end by the deadline or soon after it; what was not measured says why.
void measure_pairs(GpuTopology& topology, const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline,
                   std::chrono::milliseconds each = std::chrono::seconds(10), size_t large_copy = size_t(64) << 20);

/// What a PCIe link carries in one direction; 0 where it is not known.
double pcie_gb_s(PcieLink link);

/// How much longer a small write to the other GPU's memory takes than one to its own: a rule of thumb for the kind of
/// way between them, and no figure of any machine.
double way_us(const GpuPair& pair);

}  // namespace nvx
