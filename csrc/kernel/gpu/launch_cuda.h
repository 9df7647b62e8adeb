#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/error.h"
#include "kernel/gpu/job.h"

/// The device algorithms as CUDA kernels. Without CUDA in the build every one of these says so in its Status.
namespace nvx::kernel {

inline constexpr int kLanes = 512;  ///< threads a block

/// Jobs and listed pieces that one launch holds.
inline constexpr size_t kLaunchJobs = 16;
inline constexpr size_t kLaunchPieces = 1024;

/// Whether there are any kernels in this build.
bool built_with_cuda();

/// Refuses, in a sentence, what would make a kernel read or write where it must not. Needs no device and no CUDA, and
/// allocates nothing where it does not refuse.
Status check_launch(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table);

/// Runs operations of one rank on a stream (a cudaStream_t) of the device that the rank's memory is on, if check_launch
/// allows them. Nothing is waited for and nothing allocated. table: what the jobs list. Each block does one operation
/// after the other and waits for no other block: none may read or write what another one of the launch writes, and
/// where one fails, blocks that were ahead have written some of the later ones.
Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table, void* stream);

/// What a kernel asks of the current device.
struct KernelFacts {
  const char* name;
  int registers;       ///< a thread
  size_t local_bytes;  ///< a thread, spilled or on its stack
  int resident;        ///< blocks of kLanes that the whole device holds at once
};
/// Loads every kernel, so that no later launch has to, and says what each asks for.
Status load_cuda(std::vector<KernelFacts>* facts);

/// One rank of a fused launch; all of it in the device's memory.
struct FusedRank {
  DeviceChannel channel;
  const Job* jobs;
  uint32_t count;
  const Piece* table;
};
/// For tests on a single device: all ranks in one cooperative launch, which runs all blocks of all of them at once.
/// ranks: in the device's memory.
Status launch_fused(const FusedRank* ranks, uint32_t count, uint32_t blocks, void* stream);

}  // namespace nvx::kernel
