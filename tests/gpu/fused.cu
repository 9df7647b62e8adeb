#include "gpu/fused.h"

#include <cuda_runtime_api.h>

#include <string>

#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

extern __shared__ kernel::Peer shared_peers[];

__global__ void __launch_bounds__(kernel::kLanes, 1) run_fused(const FusedRank* ranks, uint32_t blocks) {
  const FusedRank& rank = ranks[blockIdx.x / blocks];
  const kernel::CudaMachine machine(int(blockIdx.x % blocks), int(blocks));
  kernel::run_jobs<kernel::PushRules>(machine, rank.channel, shared_peers, rank.jobs, rank.count, rank.table,
                                      [](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable table) {
                                        return kernel::run_device_collective(ex, ch, job, table);
                                      });
}

}  // namespace

Status launch_fused(const FusedRank* ranks, uint32_t count, uint32_t blocks, void* stream) {
  void* arguments[] = {&ranks, &blocks};
  const cudaError_t error =
      cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(run_fused), dim3(count * blocks), dim3(kernel::kLanes),
                                  arguments, kernel::kMostSharedBytes, static_cast<cudaStream_t>(stream));
  if (error == cudaSuccess) return {};
  return {Code::kSystem, std::string("nvx: a fused launch: ") + cudaGetErrorString(error)};
}

}  // namespace nvx::gpu
