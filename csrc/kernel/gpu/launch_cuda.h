#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "kernel/gpu/job.h"

/// The device algorithms as CUDA kernels. Without CUDA each function returns an error Status.
namespace nvx::kernel {

inline constexpr int kLanes = 512;           ///< threads per block
inline constexpr int kRegisters = 64 << 10;  ///< of an SM, which a block may take all of

/// The most jobs and listed pieces of one launch.
inline constexpr size_t kLaunchJobs = 16;
inline constexpr size_t kLaunchPieces = 1024;

bool built_with_cuda();

/// Refuses any launch in which a kernel would access memory that it must not. Needs neither a device nor CUDA, and does
/// not allocate unless it refuses.
Status check_launch(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table);

/// Runs operations of one rank on a stream (a cudaStream_t) of the device of the rank's memory, if check_launch()
/// accepts them. Neither waits nor allocates. `table` holds the pieces that the jobs list. Each block runs the
/// operations in order and waits for no other block. So no operation may access what another one of the launch writes;
/// and if one fails, blocks that were ahead have written parts of later ones.
Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table, void* stream);

/// Parts of all ranks' memory behind one address (memory/gpu/device_multicast.h), for kernel/gpu/multicast.h.
struct MulticastView {
  static constexpr uint32_t kSlots = 2;  ///< of a block's inputs, and as many of sums
  std::byte* all = nullptr;              ///< the address of all parts
  std::byte* mine = nullptr;             ///< this rank's part
  uint64_t bytes = 0;                    ///< of each part; the same on all ranks

  constexpr size_t slot(uint32_t blocks) const { return bytes / (2 * kSlots * blocks) / kCacheLine * kCacheLine; }
};
/// Whether these are a job of kReduceMulticast, which has a launch of its own.
inline bool is_multicast(std::span<const Job> jobs) {
  return !jobs.empty() && jobs[0].algorithm == DeviceAlgorithm::kReduceMulticast;
}
/// As check_launch and launch_cuda, for one job of kReduceMulticast: a sum of float32, bfloat16 or float16.
Status check_multicast(const DeviceChannel& channel, const Job& job, const MulticastView& view);
Status launch_multicast_cuda(const DeviceChannel& channel, const Job& job, const MulticastView& view, void* stream);

/// Launches a kernel with blocks of kLanes threads. For the .cu files.
Status launch_on(void* stream, const void* kernel, uint32_t blocks, void** arguments, size_t shared_bytes,
                 const char* what);

struct KernelAttributes {
  const char* name;
  int registers;       ///< per thread
  size_t local_bytes;  ///< per thread, for spills and the stack
  int resident;        ///< blocks of kLanes that the whole device holds at once
};
/// Loads every kernel, so that no launch has to, and returns their resources.
Status load_cuda(std::vector<KernelAttributes>* attributes);

/// Runs one rank's kernels: on a CUDA device or, where a test overrides it, on threads of the host.
class KernelLauncher {
 public:
  virtual ~KernelLauncher() = default;
  /// As launch_cuda, or launch_multicast_cuda for kReduceMulticast. The stream is of the thread's current device.
  virtual Status launch(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                        const MulticastView& view, void* stream) {
    return is_multicast(jobs) ? launch_multicast_cuda(channel, jobs[0], view, stream)
                              : launch_cuda(channel, jobs, table, stream);
  }
  /// The same on a stream that the driver has created, for the trial, which runs before torch has streams.
  virtual Status launch_on_stream(uint64_t stream, const DeviceChannel& channel, std::span<const Job> jobs,
                                  std::span<const Piece> table, const MulticastView& view) {
    return launch(channel, jobs, table, view, reinterpret_cast<void*>(stream));  // a CUstream is a cudaStream_t
  }
  /// As load_cuda, once, on the calling thread's current device.
  virtual Status attributes(std::vector<KernelAttributes>* attributes) {
    if (known_.empty()) {
      std::vector<KernelAttributes> loaded;
      NVX_TRY(load_cuda(&loaded));
      known_ = std::move(loaded);
    }
    *attributes = known_;
    return {};
  }

 private:
  std::vector<KernelAttributes> known_;
};

}  // namespace nvx::kernel
