#include <cuda_runtime_api.h>

#include "gpu/control.h"
#include "kernel/exec.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

constexpr uint64_t kMost = 5'000'000'000;

/// Waits until the flag reaches `want`. False: it did not within kMost. It reads the clock as rarely as the waits of
/// the operations do: more frequent reads would see a raised flag later and make the operations look faster in
/// comparison.
__device__ bool await(const kernel::CudaMachine& machine, const Stamp& flag, Stamp want) {
  uint64_t began = 0;
  for (uint32_t turn = 1; !reached(machine.acquire(flag), want); ++turn) {
    machine.relax();
    if (turn % kernel::CudaMachine::kPollsPerCheck != 0) continue;
    const uint64_t now = machine.now_ns();
    if (began == 0) began = now;
    if (now - began > kMost) return false;
  }
  return true;
}

struct Arguments {
  uint64_t words[kArgumentBytes / 8];
};
__global__ void __launch_bounds__(kernel::kLanes) nothing() {}
__global__ void __launch_bounds__(kernel::kLanes) nothing_of(const __grid_constant__ Arguments) {}

__global__ void __launch_bounds__(kernel::kLanes) exchange_flags(const __grid_constant__ ControlRounds c) {
  const uint32_t me = blockIdx.x / c.blocks, block = blockIdx.x % c.blocks, peer = threadIdx.x;
  const kernel::CudaMachine machine(int(block), int(c.blocks));
  const auto line = [&](uint32_t owner, uint32_t writer) -> ControlLine& {
    return c.lines[(owner * c.blocks + block) * c.ranks + writer];
  };
  const Stamp done = line(me, 0).rounds;
  bool ok = true;
  for (uint32_t i = 1; ok && i <= c.rounds; ++i) {
    if (peer < c.ranks && peer != me) {
      machine.signal(line(peer, me).flag, done + i);
      ok = await(machine, line(me, peer).flag, done + i);
    }
    ok = machine.all(ok);
  }
  if (!ok && threadIdx.x == 0) machine.store(*c.late, 1);
  if (threadIdx.x == 0) line(me, 0).rounds = done + c.rounds;
}

__global__ void sleep(uint64_t ns) {
  const kernel::CudaMachine machine(0, 1);
  const uint64_t began = machine.now_ns();
  while (machine.now_ns() - began < ns) {
  }
}

__global__ void answer(const __grid_constant__ ControlPing p) {
  const kernel::CudaMachine machine(0, 1);
  bool ok = true;
  for (uint32_t i = 1; ok && i <= p.rounds; ++i) {
    if (p.first != 0) machine.signal(*p.theirs, p.from + i);
    ok = await(machine, *p.mine, p.from + i);
    if (ok && p.first == 0) machine.signal(*p.theirs, p.from + i);
  }
  if (!ok) machine.store(*p.late, 1);
}

}  // namespace

int launch_empty(uint32_t blocks, void* stream, bool with_arguments) {
  Arguments some{};
  void* arguments[] = {&some};
  const void* const kernel =
      with_arguments ? reinterpret_cast<const void*>(nothing_of) : reinterpret_cast<const void*>(nothing);
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kernel::kLanes), with_arguments ? arguments : nullptr, 0,
                          static_cast<cudaStream_t>(stream));
}

int launch_rounds(const ControlRounds& rounds, void* stream) {
  void* arguments[] = {const_cast<ControlRounds*>(&rounds)};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(exchange_flags), dim3(rounds.ranks * rounds.blocks),
                                     dim3(kernel::kLanes), arguments, 0, static_cast<cudaStream_t>(stream));
}

int launch_sleep(uint64_t ns, void* stream) {
  void* arguments[] = {&ns};
  return cudaLaunchKernel(reinterpret_cast<const void*>(sleep), dim3(1), dim3(1), arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

int launch_ping(const ControlPing& ping, void* stream) {
  void* arguments[] = {const_cast<ControlPing*>(&ping)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(answer), dim3(1), dim3(1), arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace nvx::gpu
