#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"

/// Kernels that do next to nothing, to hold the others against.
namespace nvx::gpu {

/// A line of a block and peer: the flags that one other rank raises.
struct alignas(128) ControlLine {
  Stamp flag;
  Stamp rounds;  ///< of the first line of a block: rounds that it has done
};

/// Ranks that meet by flags and do nothing else: every block with the same block of every other rank.
struct ControlRounds {
  ControlLine* lines;  ///< ranks x blocks x ranks, in the device's memory, zero at first
  uint32_t ranks;
  uint32_t blocks;
  uint32_t rounds;  ///< a launch
  uint32_t* late;   ///< raised when a round took more than five seconds
};
constexpr size_t control_bytes(uint32_t ranks, uint32_t blocks) {
  return size_t(ranks) * ranks * blocks * sizeof(ControlLine);
}

/// As many threads a block as the operations have. stream: a cudaStream_t. The answers are cudaError_t.
int launch_empty(uint32_t blocks, void* stream);
/// All ranks' blocks in one cooperative launch.
int launch_rounds(const ControlRounds& rounds, void* stream);

/// A kernel that only takes its time.
int launch_sleep(uint64_t ns, void* stream);

/// One of two ends that raise each other's flag in turns; of the other device, `theirs`. 5 s are the most.
struct ControlPing {
  Stamp* mine;
  Stamp* theirs;
  uint32_t first;  ///< this end begins
  Stamp from;      ///< what the flags hold
  uint32_t rounds;
  uint32_t* late;  ///< raised when one did not come in time
};
int launch_ping(const ControlPing& ping, void* stream);

}  // namespace nvx::gpu
