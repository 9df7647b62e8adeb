#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernel/gpu/capture.h"
#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/multicast.h"
#include "kernel/gpu/signals.h"

namespace nvx::kernel {
namespace {

/// The arguments of a kernel. They are passed by value, so a graph keeps its own copy.
template <size_t kJobs, size_t kPieces>
struct KernelArgs {
  DeviceChannel channel;
  uint32_t count;
  Job jobs[kJobs];
  Piece table[kPieces];
};
using Single = KernelArgs<1, 16>;
using Several = KernelArgs<kLaunchJobs, kLaunchPieces>;
static_assert(sizeof(Single) <= 1024 && sizeof(Several) <= 32764);

extern __shared__ Peer shared_peers[];

// The launch bounds request one block per multiprocessor. Without them, compilers for some architectures make room for
// two blocks, give each half of the registers, and spill in the loops.

/// One operation of a hot kind: all of its state is in registers, and only failures make calls.
template <class Kind>
__global__ void __launch_bounds__(kLanes, 1) run_hot_kind(const __grid_constant__ Single args) {
  run_jobs<PushRules, Kind>(
      CudaMachine(int(blockIdx.x), int(gridDim.x)), args.channel, shared_peers, args.jobs, 1, args.table,
      [](auto& ex, auto& ch, const Job& job, PieceTable) { return run_hot(ex, ch, job, Kind()); });
}

/// Any operations.
template <class KernelArgs>
__global__ void __launch_bounds__(kLanes, 1) run_any(const __grid_constant__ KernelArgs args) {
  run_jobs<PushRules>(
      CudaMachine(int(blockIdx.x), int(gridDim.x)), args.channel, shared_peers, args.jobs, args.count, args.table,
      [](auto& ex, auto& ch, const Job& job, PieceTable table) { return run_device_collective(ex, ch, job, table); });
}

struct Row {
  const char* name;
  const void* kernel;
};

template <class Kernel>
const void* address_of(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}
template <DeviceAlgorithm kAlgorithm, class T = void>
const void* hot_kernel() {
  return address_of(run_hot_kind<HotOperation<kAlgorithm, T>>);
}

const Row kRows[] = {
    {"single", address_of(run_any<Single>)},
    {"several", address_of(run_any<Several>)},
    {"reduce_packets f32", hot_kernel<DeviceAlgorithm::kReducePackets, float>()},
    {"reduce_packets bf16", hot_kernel<DeviceAlgorithm::kReducePackets, BF16>()},
    {"reduce_packets f16", hot_kernel<DeviceAlgorithm::kReducePackets, F16>()},
    {"reduce_packets_two_shot f32", hot_kernel<DeviceAlgorithm::kReducePacketsTwoShot, float>()},
    {"reduce_packets_two_shot bf16", hot_kernel<DeviceAlgorithm::kReducePacketsTwoShot, BF16>()},
    {"reduce_packets_two_shot f16", hot_kernel<DeviceAlgorithm::kReducePacketsTwoShot, F16>()},
    {"reduce_chunks f32", hot_kernel<DeviceAlgorithm::kReduceChunks, float>()},
    {"reduce_chunks bf16", hot_kernel<DeviceAlgorithm::kReduceChunks, BF16>()},
    {"reduce_chunks f16", hot_kernel<DeviceAlgorithm::kReduceChunks, F16>()},
    {"exchange_packets", hot_kernel<DeviceAlgorithm::kExchangePackets>()},
    {"exchange_chunks", hot_kernel<DeviceAlgorithm::kExchangeChunks>()},
    {"exchange_pieces", hot_kernel<DeviceAlgorithm::kExchangePieces>()},
    {"signals", signal_kernel()},
    {"reduce_multicast f32", multicast_kernel(0)},
    {"reduce_multicast bf16", multicast_kernel(1)},
    {"reduce_multicast f16", multicast_kernel(2)},
};

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {Code::kSystem, std::string("nvx: ") + what + ": " + cudaGetErrorString(error)};
}

template <class KernelArgs>
Status launch(const void* kernel, const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
              void* stream, bool gathers = false) {
  KernelArgs args{channel.prepared(), uint32_t(jobs.size()), {}, {}};
  std::copy(jobs.begin(), jobs.end(), args.jobs);
  std::copy(table.begin(), table.end(), args.table);
  void* arguments[] = {&args};
  return launch_on(stream, kernel, channel.shape.blocks, arguments, shared_bytes(channel.shape.ranks, gathers),
                   "a kernel launch");
}

}  // namespace

bool built_with_cuda() { return true; }

Status launch_on(void* stream, const void* kernel, uint32_t blocks, void** arguments, size_t shared_bytes,
                 const char* what) {
  return status_of(
      cudaLaunchKernel(kernel, dim3(blocks), dim3(kLanes), arguments, shared_bytes, static_cast<cudaStream_t>(stream)),
      what);
}

Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                   void* stream) {
  NVX_TRY(check_launch(channel, jobs, table));
  if (jobs.empty()) return {};
  const bool single = jobs.size() == 1 && table.size() <= std::size(Single().table);
  if (!single) return launch<Several>(address_of(run_any<Several>), channel, jobs, table, stream);
  const void* kernel = address_of(run_any<Single>);
  bool gathers = false;
  with_hot_operation(channel, jobs[0], table.data(), [&]<class Kind>(Kind) {
    kernel = address_of(run_hot_kind<Kind>);
    gathers = Kind::kGathers;
  });
  return launch<Single>(kernel, channel, jobs, table, stream, gathers);
}

Status load_cuda(std::vector<KernelAttributes>* attributes) {
  constexpr int kLargeArguments = 12010;  // older drivers refuse a launch with more than 4 KiB of arguments
  int device = 0, processors = 0, version = 0;
  size_t stack = 0, most = 0;
  NVX_TRY(status_of(cudaDriverGetVersion(&version), "the driver's version"));
  if (version < kLargeArguments) {
    return {Code::kSystem,
            "nvx: the driver serves CUDA " + std::to_string(version / 1000) + "." +
                std::to_string(version % 1000 / 10) + ", and nvx's kernels need 12.1",
            "install driver R530 or newer"};
  }
  NVX_TRY(status_of(cudaGetDevice(&device), "cudaGetDevice"));
  NVX_TRY(status_of(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device attributes"));
  for (const Row& row : kRows) {
    cudaFuncAttributes a{};
    int blocks = 0;
    NVX_TRY(status_of(cudaFuncGetAttributes(&a, row.kernel), row.name));
    NVX_TRY(status_of(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, row.kernel, kLanes, kMostSharedBytes),
                      row.name));
    attributes->push_back({row.name, a.numRegs, a.localSizeBytes, blocks * processors});
    most = std::max(most, a.localSizeBytes);
  }
  // A launch that needs a larger stack enlarges it, which waits for the kernels in flight; these may be waiting for
  // this launch.
  NVX_TRY(status_of(cudaDeviceGetLimit(&stack, cudaLimitStackSize), "the device's limits"));
  if (stack < most) NVX_TRY(status_of(cudaDeviceSetLimit(cudaLimitStackSize, most), "room for the kernels' stacks"));
  return {};
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

Status TailEvent::make() {
  if (event_) return {};
  cudaEvent_t event = nullptr;
  NVX_TRY(status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event"));
  event_ = event;
  return {};
}

Status TailEvent::block(void* stream, bool captured) {
  NVX_TRY(make());
  return status_of(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event_),
                                       captured ? cudaEventWaitExternal : cudaEventWaitDefault),
                   "waiting for an event");
}

/// cudaEventRecordWithFlags() would put the record between two kernels of the stream.
Status TailEvent::record(void* stream, uint64_t capture) {
  NVX_TRY(make());
  const auto on = static_cast<cudaStream_t>(stream);
  const auto event = static_cast<cudaEvent_t>(event_);
  if (capture == 0) return status_of(cudaEventRecord(event, on), "recording an event");
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  NVX_TRY(status_of(cudaStreamGetCaptureInfo(on, &status, nullptr, &graph, &last, nullptr, &count), "a capture's end"));
#else
  NVX_TRY(status_of(cudaStreamGetCaptureInfo_v2(on, &status, nullptr, &graph, &last, &count), "a capture's end"));
#endif
  if (capture_ != capture) {
    cudaGraphNode_t record = nullptr;
    NVX_TRY(
        status_of(cudaGraphAddEventRecordNode(&record, graph, last, count, event), "recording an event in a graph"));
    capture_ = capture, record_ = record;
    return {};
  }
  const std::vector<cudaGraphNode_t> to(count, static_cast<cudaGraphNode_t>(record_));
#if CUDART_VERSION >= 13000
  return status_of(cudaGraphAddDependencies(graph, last, to.data(), nullptr, count), "ordering a graph's record");
#else
  return status_of(cudaGraphAddDependencies(graph, last, to.data(), count), "ordering a graph's record");
#endif
}

namespace {

bool is_over(cudaError_t error) {
  return error != cudaErrorNotReady && error != cudaErrorStreamCaptureUnsupported && error != cudaErrorCapturedEvent &&
         error != cudaErrorStreamCaptureImplicit;
}

}  // namespace

bool TailEvent::passed() const { return !event_ || is_over(cudaEventQuery(static_cast<cudaEvent_t>(event_))); }

}  // namespace nvx::kernel
