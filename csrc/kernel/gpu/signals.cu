#include "kernel/gpu/signals.h"

#include <cuda_runtime_api.h>

#include "kernel/gpu/launch_cuda.h"

namespace nvx::kernel {
namespace {

__global__ void __launch_bounds__(kLanes, 1)
    signals(const __grid_constant__ DeviceChannel channel, const __grid_constant__ SignalJob job) {
  (void)run_signals(CudaMachine(0, 1), channel, job);
}

}  // namespace

const void* signal_kernel() { return reinterpret_cast<const void*>(&signals); }

Status signal_cuda(const DeviceChannel& channel, const SignalJob& job, void* stream) {
  DeviceChannel on = channel;
  SignalJob copy = job;
  void* arguments[] = {&on, &copy};
  return launch_on(stream, signal_kernel(), 1, arguments, 0, "a launch of signals");
}

}  // namespace nvx::kernel
