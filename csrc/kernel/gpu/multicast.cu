#include "kernel/gpu/multicast.h"

#include <cuda_runtime_api.h>

#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::kernel {
namespace {

/// Adds the `multimem` instructions. Architectures before sm_90 have none; their devices report no multicast.
class MulticastMachine : public CudaMachine {
 public:
  using CudaMachine::CudaMachine;

  template <class T>
  __device__ Pack sum_of_parts(const std::byte* at) const {
    uint32_t r[4] = {};
    if constexpr (!kHasMulticast) {
      return {};
    } else if constexpr (std::is_same_v<T, float>) {
      float f[4];
      asm volatile("multimem.ld_reduce.relaxed.sys.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
                   : "l"(at)
                   : "memory");
      for (int i = 0; i < 4; ++i) r[i] = __float_as_uint(f[i]);
    } else if constexpr (std::is_same_v<T, BF16>) {
      asm volatile("multimem.ld_reduce.relaxed.sys.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "l"(at)
                   : "memory");
    } else {
      asm volatile("multimem.ld_reduce.relaxed.sys.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "l"(at)
                   : "memory");
    }
    return {{uint64_t(r[1]) << 32 | r[0], uint64_t(r[3]) << 32 | r[2]}};
  }
  /// The bits as they are: a store does not interpret its type.
  __device__ void store_to_parts(std::byte* at, const Pack& pack) const {
    const auto half = [&](int i) { return __uint_as_float(uint32_t(pack.words[i / 2] >> 32 * (i % 2))); };
    if constexpr (kHasMulticast)
      asm volatile("multimem.st.relaxed.sys.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(half(0)), "f"(half(1)),
                   "f"(half(2)), "f"(half(3))
                   : "memory");
  }
  /// Orders accesses to a part through its own address and through that of all parts.
  __device__ void fence_parts() const { asm volatile("fence.proxy.alias;" ::: "memory"); }
};

struct Args {
  DeviceChannel channel;
  Job job;
  MulticastView view;
  Piece table[1];  // not used: without one the compiler would put a trap where a job lists pieces
};

extern __shared__ Peer shared_peers[];

template <class T>
__global__ void __launch_bounds__(kLanes, 1) run_multicast(const __grid_constant__ Args args) {
  run_jobs<PushRules, MulticastOperation<T>>(
      MulticastMachine(int(blockIdx.x), int(gridDim.x)), args.channel, shared_peers, &args.job, 1, args.table,
      [&](auto& ex, auto& ch, const Job& job, PieceTable) { return reduce_multicast<T>(ex, ch, job, args.view); });
}

template <class T>
const void* kernel_of() {
  return reinterpret_cast<const void*>(run_multicast<T>);
}

}  // namespace

const void* multicast_kernel(int i) {
  const void* const kernels[kMulticastKernels] = {kernel_of<float>(), kernel_of<BF16>(), kernel_of<F16>()};
  return kernels[i];
}

Status launch_multicast_cuda(const DeviceChannel& channel, const Job& job, const MulticastView& view, void* stream) {
  NVX_TRY(check_multicast(channel, job, view));
  Args args{channel.prepared(), job, view, {}};
  void* arguments[] = {&args};
  const void* kernel = nullptr;
  with_multicast_type(job, [&](auto type) { kernel = kernel_of<decltype(type)>(); });
  return launch_on(stream, kernel, channel.shape.blocks, arguments,
                   shared_bytes(channel.shape.ranks, /*gathers=*/false), "a launch of reduce_multicast");
}

}  // namespace nvx::kernel
