#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "group/plan/plan.h"
#include "kernel/cpu/run_on_cpu.h"
#include "kernel/gpu/job.h"

namespace nvx {

/// The link over which kernels push.
struct DeviceLink {
  using Kind = GpuLink;
  Kind kind = Kind::kNvlink;
  double gb_s = 450;     ///< in one direction, from the link's data sheet; of one GPU: for all ranks together
  std::string hardware;  ///< the hardware that has this link
};

/// The bytes a second, in one direction, that the stores of kernels reach over the link.
double usable(const DeviceLink& link, size_t ranks);

/// The channel that the first groups of a process get.
kernel::DeviceShape shape_for(const PlanFacts& facts, GpuLink link);

/// The cost of a collective by kernels, calculated from the terms of its algorithm: rounds, fences, bytes in flight,
/// and the rates of a block and of the link. Only the terms inside a GPU are measured, so every figure is a prediction.
struct KernelCost {
  double seconds = 0;     ///< of the kernel in a graph, its launch included; 0: no other rank, or no data
  uint64_t rounds = 0;    ///< of chunks, in each block, with a fence of system scope each
  uint64_t waits = 0;     ///< for other ranks, in sequence
  size_t sent = 0;        ///< bytes that the busiest rank pushes or receives
  size_t in_flight = 0;   ///< bytes that a block has in flight at once
  double block_gb_s = 0;  ///< that a block would send if the link had no limit
  double gb_s = 0;        ///< that the rank sends in `seconds`; of an all_reduce by chunks: its bus bandwidth
};

/// Packs that a lane of a hot kernel loads before it stores the first one, of chunks: `copy_all()` and sums in
/// `kernel/gpu/packs.h`, but for float16's sums, which load half as many.
inline constexpr uint32_t kLoadsAtOnce = 8;

/// `bytes`: as for `ExplainRequest`. For the hot kernels; the general ones take longer. `loads`: see `kLoadsAtOnce`.
KernelCost cost_of(kernel::DeviceAlgorithm algorithm, kernel::Collective collective, size_t bytes,
                   const kernel::DeviceShape& shape, const DeviceLink& link, uint32_t loads = kLoadsAtOnce);

std::string terms_of(const KernelCost& cost, const kernel::DeviceShape& shape, const DeviceLink& link);

}  // namespace nvx
