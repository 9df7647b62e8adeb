#include "gpu/without.h"

#include <cuda_runtime_api.h>

#include <string>

#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

using kernel::CudaMachine;
using kernel::DeviceAlgorithm;

struct Args {
  kernel::DeviceChannel channel;
  kernel::Job job;
};

extern __shared__ kernel::Peer shared_peers[];

struct SilentMachine : CudaMachine {
  using CudaMachine::CudaMachine;
  template <class Word>
  __device__ void store_host(Word&, Word) const {}
};

struct FencelessMachine : CudaMachine {
  using CudaMachine::CudaMachine;
  __device__ void fence() const {}
};

template <class Machine, class Kind>
__global__ void __launch_bounds__(kernel::kLanes, 1) run_without(const __grid_constant__ Args args) {
  kernel::run_jobs<kernel::PushRules, Kind>(
      Machine(int(blockIdx.x), int(gridDim.x)), args.channel, shared_peers, &args.job, 1, nullptr,
      [](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable) { return run_hot(ex, ch, job, Kind()); });
}

template <class Machine>
const void* kernel_of(DeviceAlgorithm algorithm) {
  if (algorithm == DeviceAlgorithm::kReducePackets)
    return reinterpret_cast<const void*>(
        run_without<Machine, kernel::HotOperation<DeviceAlgorithm::kReducePackets, float>>);
  return reinterpret_cast<const void*>(
      run_without<Machine, kernel::HotOperation<DeviceAlgorithm::kReduceChunks, float>>);
}

}  // namespace

Status launch_without(Without without, const kernel::DeviceChannel& channel, const kernel::Job& job, void* stream) {
  const void* kernel = nullptr;
  switch (without) {
    case Without::kNothing: return kernel::launch_cuda(channel, {&job, 1}, {}, stream);
    case Without::kHostWrites: kernel = kernel_of<SilentMachine>(job.algorithm); break;
    case Without::kFences: kernel = kernel_of<FencelessMachine>(job.algorithm); break;
  }
  Args args{channel.prepared(), job};
  void* arguments[] = {&args};
  const cudaError_t error =
      cudaLaunchKernel(kernel, dim3(channel.shape.blocks), dim3(kernel::kLanes), arguments,
                       kernel::shared_bytes(channel.shape.ranks, /*gathers=*/true), static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return {};
  return {Code::kSystem, std::string("nvx: a launch without something: ") + cudaGetErrorString(error)};
}

}  // namespace nvx::gpu
