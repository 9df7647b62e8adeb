#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"

/// Kernels that do almost nothing, as a baseline for the others.
namespace nvx::gpu {

/// A line for each block and peer: the flags that one other rank raises.
struct alignas(128) ControlLine {
  Stamp flag;
  Stamp rounds;  ///< of the first line of a block: rounds that it has done
};

/// Ranks that only exchange flags: every block with the same block of every other rank.
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

/// As many bytes as the arguments of an operation take, about.
inline constexpr size_t kArgumentBytes = 1024;

/// As many threads a block as the operations have. `stream` is a cudaStream_t. The return values are cudaError_t.
int launch_empty(uint32_t blocks, void* stream, bool with_arguments = false);
/// Launches the blocks of all ranks in one cooperative launch.
int launch_rounds(const ControlRounds& rounds, void* stream);

/// A kernel that only waits.
int launch_sleep(uint64_t ns, void* stream);

/// One of two ends that raise each other's flag in turn. `theirs` is on the other device. It waits 5 s at most.
struct ControlPing {
  Stamp* mine;
  Stamp* theirs;
  uint32_t first;  ///< this end begins
  Stamp from;      ///< what the flags hold
  uint32_t rounds;
  uint32_t* late;  ///< raised when one did not arrive in time
};
int launch_ping(const ControlPing& ping, void* stream);

}  // namespace nvx::gpu
