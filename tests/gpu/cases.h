#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/report.h"
#include "support/ways.h"

/// What must be right, whoever performs it: all ranks' kernels on a device, or threads that play them.
namespace nvx::gpu {

/// One operation of all ranks.
struct Act {
  kernel::DeviceAlgorithm algorithm;
  test::Play play;
};
std::string describe(const Act& act);

struct StageShape {
  kernel::DeviceShape device;
  uint32_t first_epoch = 0;
  Stamp first_chunk = 0;
};

/// A channel, with all its ranks.
class Stage {
 public:
  virtual ~Stage() = default;
  /// All ranks run these, one after the other. Empty: every output is what it has to be.
  virtual std::string perform(const std::vector<Act>& acts) = 0;
};
using MakeStage = std::function<std::unique_ptr<Stage>(const StageShape&)>;

/// Whether every rank may run it on such a channel.
bool fits(const Act& act, const kernel::DeviceShape& shape);

struct CaseOptions {
  std::vector<uint32_t> ranks = {1, 2, 3, 4, 7, 8};
  uint32_t most_blocks = 16;  ///< of all ranks together, that run at once
  size_t at_once = 8;         ///< operations a kernel
  bool lean = false;          ///< a few of each: where every access is watched, or a thread plays every lane
};

/// Every algorithm x collective x type x operator, at odd counts and offsets, in and out of place, with values that are
/// not normal, and with epochs about to wrap: each output bit for bit against what the host's loops make of the inputs.
void run_cases(const MakeStage& make, const CaseOptions& options, Report& report);

/// A few of every way, for a channel whose making is what matters.
std::vector<Act> some_acts(uint32_t ranks, const kernel::DeviceShape& shape, uint64_t first_round);

/// The algorithms of CPU tensors on the very machine, at every level of its processor, against the same reference.
void run_cpu_path(const CaseOptions& options, Report& report);

}  // namespace nvx::gpu
