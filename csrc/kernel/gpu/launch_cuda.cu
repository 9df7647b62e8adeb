#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>

#include "kernel/gpu/capture.h"
#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::kernel {
namespace {

/// The arguments of a kernel. They are passed by value, so a graph keeps its own copy.
template <size_t kJobs, size_t kPieces>
struct KernelArgs {
  DeviceChannel channel;
  const FusedRank* fused;  ///< several ranks, in device memory, instead of `channel`
  uint32_t count;
  Job jobs[kJobs];
  Piece table[kPieces];
};
using Single = KernelArgs<1, 16>;
using Several = KernelArgs<kLaunchJobs, kLaunchPieces>;
static_assert(sizeof(Single) <= 1024 && sizeof(Several) <= 32764);

// Each kernel is compiled for a fixed set of algorithms, so it contains no unreachable code. The launch bounds ask for
// one block per multiprocessor. Without them, compilers for some architectures make room for two blocks, give each half
// of the registers, and spill in the loops.

__global__ void __launch_bounds__(kLanes, 1) run_reduction(const __grid_constant__ Single args) {
  run_jobs<PushRules>(
      CudaMachine(int(blockIdx.x), int(gridDim.x)), args.channel, args.jobs, 1, args.table,
      [](auto& ex, auto& ch, const Job& job, PieceTable table) { return run_reducing(ex, ch, job, table); });
}

__global__ void __launch_bounds__(kLanes, 1) run_exchange(const __grid_constant__ Single args) {
  run_jobs<PushRules>(
      CudaMachine(int(blockIdx.x), int(gridDim.x)), args.channel, args.jobs, 1, args.table,
      [](auto& ex, auto& ch, const Job& job, PieceTable table) { return run_exchanging(ex, ch, job, table); });
}

/// Several operations of any kind, or the operations of several ranks.
__global__ void __launch_bounds__(kLanes, 1) run_several(const __grid_constant__ Several args) {
  const auto run = [](auto& ex, auto& ch, const Job& job, PieceTable table) {
    return run_device_collective(ex, ch, job, table);
  };
  const uint32_t blocks = args.channel.shape.blocks;
  const FusedRank self{args.channel, args.jobs, args.count, args.table};
  const FusedRank& rank = args.fused ? args.fused[blockIdx.x / blocks] : self;
  const CudaMachine machine(int(blockIdx.x % blocks), int(blocks));
  run_jobs<PushRules>(machine, rank.channel, rank.jobs, rank.count, rank.table, run);
}

struct Row {
  const char* name;
  const void* kernel;
};

/// The launch table.
enum Kernel : size_t { kReduction, kExchange, kSeveral };
const Row kRows[] = {
    {"reduction", reinterpret_cast<const void*>(run_reduction)},
    {"exchange", reinterpret_cast<const void*>(run_exchange)},
    {"several", reinterpret_cast<const void*>(run_several)},
};

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {Code::kSystem, std::string("nvx: ") + what + ": " + cudaGetErrorString(error)};
}

template <class KernelArgs>
Status launch(size_t row, const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
              cudaStream_t stream) {
  KernelArgs args{channel, nullptr, uint32_t(jobs.size()), {}, {}};
  std::copy(jobs.begin(), jobs.end(), args.jobs);
  std::copy(table.begin(), table.end(), args.table);
  void* arguments[] = {&args};
  return status_of(cudaLaunchKernel(kRows[row].kernel, dim3(channel.shape.blocks), dim3(kLanes), arguments, 0, stream),
                   kRows[row].name);
}

}  // namespace

bool built_with_cuda() { return true; }

Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                   void* stream) {
  NVX_TRY(check_launch(channel, jobs, table));
  if (jobs.empty()) return {};
  const bool single = jobs.size() == 1 && table.size() <= std::size(Single().table);
  const auto on = static_cast<cudaStream_t>(stream);
  if (!single) return launch<Several>(kSeveral, channel, jobs, table, on);
  return launch<Single>(reduces(jobs[0].algorithm) ? kReduction : kExchange, channel, jobs, table, on);
}

Status load_cuda(std::vector<KernelFacts>* facts) {
  int device = 0, processors = 0;
  size_t stack = 0, most = 0;
  NVX_TRY(status_of(cudaGetDevice(&device), "cudaGetDevice"));
  NVX_TRY(status_of(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device attributes"));
  for (const Row& row : kRows) {
    cudaFuncAttributes a{};
    int blocks = 0;
    NVX_TRY(status_of(cudaFuncGetAttributes(&a, row.kernel), row.name));
    NVX_TRY(
        status_of(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, row.kernel, kLanes, /*dynamic=*/0), row.name));
    facts->push_back({row.name, a.numRegs, a.localSizeBytes, blocks * processors});
    most = std::max(most, a.localSizeBytes);
  }
  // A launch that needs a larger stack enlarges it, which waits for the kernels in flight; these may be waiting for
  // this launch.
  NVX_TRY(status_of(cudaDeviceGetLimit(&stack, cudaLimitStackSize), "the device's limits"));
  if (stack < most) NVX_TRY(status_of(cudaDeviceSetLimit(cudaLimitStackSize, most), "room for the kernels' stacks"));
  return {};
}

Status launch_fused(const FusedRank* ranks, uint32_t count, uint32_t blocks, void* stream) {
  Several args{};
  args.fused = ranks;
  args.channel.shape.blocks = blocks;
  void* arguments[] = {&args};
  return status_of(cudaLaunchCooperativeKernel(kRows[kSeveral].kernel, dim3(count * blocks), dim3(kLanes), arguments, 0,
                                               static_cast<cudaStream_t>(stream)),
                   "a fused launch");
}

uint64_t capture_of(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    (void)cudaGetLastError();  // the legacy stream while another stream captures: it is not capturing itself
    return 0;
  }
  if (status == cudaStreamCaptureStatusNone) return 0;
  return status == cudaStreamCaptureStatusActive ? id + 1 : UINT64_MAX;
}

Status call_host(void* stream, void (*what)(void*), void* with) {
  return status_of(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), what, with), "a call of the host");
}

Status Tail::make() {
  if (event_) return {};
  cudaEvent_t event = nullptr;
  NVX_TRY(status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
  event_ = event;
  return {};
}

Status Tail::hold_back(void* stream, bool captured) {
  NVX_TRY(make());
  return status_of(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event_),
                                       captured ? cudaEventWaitExternal : cudaEventWaitDefault),
                   "waiting for an event");
}

Status Tail::put_behind(void* stream, bool captured) {
  NVX_TRY(make());
  return status_of(cudaEventRecordWithFlags(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream),
                                            captured ? cudaEventRecordExternal : cudaEventRecordDefault),
                   "recording an event");
}

bool Tail::passed() const {
  if (!event_) return true;
  const cudaError_t told = cudaEventQuery(static_cast<cudaEvent_t>(event_));
  return told != cudaErrorNotReady && told != cudaErrorStreamCaptureUnsupported && told != cudaErrorCapturedEvent;
}

}  // namespace nvx::kernel
