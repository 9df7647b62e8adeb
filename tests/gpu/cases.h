#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu/report.h"
#include "support/ways.h"

/// Test cases for the kernels of all ranks, run on a device or simulated by threads.
namespace nvx::gpu {

/// One operation of all ranks.
struct Case {
  kernel::DeviceAlgorithm algorithm;
  test::Spec spec;
};
std::string describe(const Case& test_case);

struct ChannelShape {
  kernel::DeviceShape device;
  uint32_t first_epoch = 0;
  Stamp first_chunk = 0;
};

/// A channel with all its ranks.
class TestChannel {
 public:
  virtual ~TestChannel() = default;
  /// Runs these on all ranks, one after the other. Empty: every output is correct.
  virtual std::string perform(const std::vector<Case>& cases) = 0;
};
using MakeChannel = std::function<std::unique_ptr<TestChannel>(const ChannelShape&)>;

/// Whether every rank can run the operation on such a channel.
bool fits(const Case& test_case, const kernel::DeviceShape& shape);

struct CaseOptions {
  std::vector<uint32_t> ranks = {1, 2, 3, 4, 7, 8};
  uint32_t most_blocks = 16;  ///< of all ranks together, that run at once
  size_t at_once = 8;         ///< operations a kernel
  bool lean = false;          ///< a few of each: where every access is watched, or a thread simulates every lane
};

/// Every algorithm x collective x type x operator, at odd counts and offsets, in and out of place, with subnormal and
/// non-finite values, and with epochs about to wrap. Each output must equal, bit for bit, the result of the host's
/// loops.
void run_cases(const MakeChannel& make, const CaseOptions& options, Report& report);

/// A few operations of every algorithm, for tests of channel set-up.
std::vector<Case> some_cases(uint32_t ranks, const kernel::DeviceShape& shape, uint64_t first_round);

/// The algorithms of CPU tensors on this machine, at every instruction-set level of its processor, against the same
/// reference.
void run_cpu_path(const CaseOptions& options, Report& report);

}  // namespace nvx::gpu
