#pragma once

#include <cstdint>

#include "base/error.h"
#include "kernel/gpu/job.h"

/// Kernels of a group without something that costs time, so that its cost can be measured. Their results are right only
/// where nothing fails and no other kernel uses the memory: they serve nothing else.
namespace nvx::gpu {

enum class Without : uint8_t {
  kNothing,
  kHostWrites,  ///< stores of the epochs that the host can see. Such short operations read no word of the host
  kFences,      ///< the fence of a round of chunks
};
constexpr const char* name_of(Without without) {
  constexpr const char* kNames[] = {"nothing", "writes to host memory", "fences"};
  return kNames[size_t(without)];
}

/// A sum of floats in one trip of packets, or by chunks. `stream` is a cudaStream_t.
Status launch_without(Without without, const kernel::DeviceChannel& channel, const kernel::Job& job, void* stream);

}  // namespace nvx::gpu
