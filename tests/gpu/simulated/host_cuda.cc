// Host threads simulate the CUDA runtime and the kernels, so that the parts of `nvx_gpu` can be tested without a
// device. Streams run concurrently, captures are recorded and replayed, and device memory is host memory. Control
// kernels do nothing.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "gpu/control.h"
#include "gpu/fused.h"
#include "gpu/without.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"
#include "support/simulated_device.h"
#include "support/simulated_stream.h"

using Launch = std::function<void()>;

/// Makes a launch when it is put on a stream: at once, or at each replay of a graph.
using Begin = std::function<Launch()>;

struct CUgraph_st {
  std::vector<Begin> begins;
};
struct CUgraphExec_st {
  std::vector<Begin> begins;
};

/// A waiter waits for the latest record at the time when the wait began.
struct CUevent_st {
  Launch record() {
    const std::lock_guard lock(mutex);
    return [this, number = ++recorded] {
      const std::lock_guard done(mutex);
      then = std::chrono::steady_clock::now();
      reached = std::max(reached, number);
      changed.notify_all();
    };
  }
  Launch wait() {
    const std::lock_guard lock(mutex);
    return [this, number = recorded] {
      std::unique_lock until(mutex);
      changed.wait(until, [&] { return reached >= number; });
    };
  }

  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point then;
};

struct CUstream_st {
  void begin(const Begin& begin) {
    if (captured) return captured->push_back(begin);
    stream.post(begin());
  }
  void post(const Launch& launch) {
    begin([launch] { return launch; });
  }
  bool idle() { return stream.idle(); }

  std::optional<std::vector<Begin>> captured;
  nvx::test::SimulatedStream stream;
};

namespace {

std::mutex all_streams_mutex;
std::set<CUstream_st*> all_streams;

constexpr std::align_val_t kAlignment{256};

}  // namespace

extern "C" {

const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of a simulated device"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceReset() { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int, int) { return *id = 0, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "threads of the host");
  properties->multiProcessorCount = 64;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = size_t(1) << 30, cudaSuccess; }
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = ::operator new(bytes, kAlignment);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** data, size_t bytes) { return cudaMalloc(data, bytes); }
cudaError_t cudaFree(void* data) { return ::operator delete(data, kAlignment), cudaSuccess; }
cudaError_t cudaFreeHost(void* data) { return cudaFree(data); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return std::memset(to, value, bytes), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return stream->post([=] { std::memcpy(to, from, bytes); }), cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return stream->post([=] { std::memset(to, value, bytes); }), cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st;
  const std::lock_guard lock(all_streams_mutex);
  all_streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard lock(all_streams_mutex);
    all_streams.erase(stream);
  }
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return stream->idle() ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaDeviceSynchronize() {
  const std::lock_guard lock(all_streams_mutex);
  for (CUstream_st* stream : all_streams) {
    while (!stream->idle()) std::this_thread::yield();
  }
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = new CUevent_st, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return stream->begin([=] { return event->record(); }), cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return stream->begin([=] { return event->wait(); }), cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(end->then - begin->then).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  return stream->captured.emplace(), cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = new CUgraph_st{*std::exchange(stream->captured, std::nullopt)};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  return *ready = new CUgraphExec_st{graph->begins}, cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
  for (const Begin& begin : ready->begins) stream->begin(begin);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) {
  delete ready;
  return cudaSuccess;
}

}  // extern "C"

namespace nvx::kernel {
namespace {

constexpr int kSimulatedLanes = 2;

}  // namespace

bool built_with_cuda() { return true; }

Status launch_cuda(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table,
                   void* stream) {
  NVX_TRY(check_launch(channel, jobs, table));
  static_cast<cudaStream_t>(stream)->post([channel, jobs = std::vector<Job>(jobs.begin(), jobs.end()),
                                           table = std::vector<Piece>(table.begin(), table.end())] {
    (void)test::simulate_kernel(channel, jobs, table.data(), kSimulatedLanes);
  });
  return {};
}

Status launch_multicast_cuda(const DeviceChannel&, const Job&, const MulticastView&, void*) {
  return {Code::kInvalid, "nvx: a simulated device has no multicast"};
}

Status signal_cuda(const DeviceChannel& channel, const SignalJob& job, void* stream) {
  static_cast<cudaStream_t>(stream)->post([channel, job] { (void)test::simulate_signals(channel, job); });
  return {};
}

uint64_t capture_of(void*) { return 0; }

Status call_host(void* stream, void (*what)(void*), void* with) {
  static_cast<cudaStream_t>(stream)->post([what, with] { what(with); });
  return {};
}

/// The counterpart of launch_cuda.cu over these events. A graph records and waits at each of its replays, as with
/// CUDA's external events.
Status TailEvent::make() {
  if (!event_) event_ = new CUevent_st;
  return {};
}

Status TailEvent::block(void* stream, bool) {
  NVX_TRY(make());
  static_cast<cudaStream_t>(stream)->begin([event = static_cast<cudaEvent_t>(event_)] { return event->wait(); });
  return {};
}

Status TailEvent::record(void* stream, uint64_t) {
  NVX_TRY(make());
  static_cast<cudaStream_t>(stream)->begin([event = static_cast<cudaEvent_t>(event_)] { return event->record(); });
  return {};
}

Status load_cuda(std::vector<KernelAttributes>* attributes) {
  attributes->push_back({"simulated", 0, 0, 64});
  return {};
}

}  // namespace nvx::kernel

namespace nvx::gpu {

Status launch_fused(const FusedRank* ranks, uint32_t count, uint32_t, void* stream) {
  static_cast<cudaStream_t>(stream)->post([ranks, count] {
    std::vector<std::thread> kernels;
    for (uint32_t r = 0; r < count; ++r)
      kernels.emplace_back([&at = ranks[r]] {
        (void)test::simulate_kernel(at.channel, {at.jobs, at.count}, at.table, 2);
      });
    for (std::thread& kernel : kernels) kernel.join();
  });
  return {};
}

Status launch_without(Without, const kernel::DeviceChannel& channel, const kernel::Job& job, void* stream) {
  return kernel::launch_cuda(channel, {&job, 1}, {}, stream);
}

int launch_empty(uint32_t, void*, bool) { return cudaSuccess; }
int launch_rounds(const ControlRounds&, void*) { return cudaSuccess; }
int launch_sleep(uint64_t ns, void* stream) {
  static_cast<cudaStream_t>(stream)->post([ns] { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); });
  return cudaSuccess;
}
int launch_ping(const ControlPing&, void*) { return cudaSuccess; }

}  // namespace nvx::gpu
