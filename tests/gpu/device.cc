#include "gpu/device.h"

#include <algorithm>
#include <thread>

#include "base/error.h"

namespace nvx::gpu {

void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw Error(Code::kSystem,
                std::string("nvx: ") + what + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

Memory::Memory(size_t bytes, Where where) : bytes_(bytes), where_(where) {
  void* data = nullptr;
  if (where == Where::kDevice) {
    must(cudaMalloc(&data, bytes), "cudaMalloc");
  } else {
    must(cudaMallocHost(&data, bytes), "cudaMallocHost");
  }
  data_ = static_cast<std::byte*>(data);
  must(cudaMemset(data_, 0, bytes), "cudaMemset");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Memory::~Memory() {
  if (where_ == Where::kDevice) {
    cudaFree(data_);
  } else {
    cudaFreeHost(data_);
  }
}

std::byte* Heap::take(size_t bytes, size_t phase) {
  const size_t at = (used_ + 255) / 256 * 256 + phase % 256;
  if (at + bytes > memory_.bytes()) throw Error(Code::kInvalid, "nvx: a case needs more memory than it was given");
  used_ = at + bytes;
  return memory_.data() + at;
}

Stream::Stream() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }

std::string Stream::wait(std::chrono::milliseconds most) const {
  const Deadline deadline = Deadline::after(most);
  for (uint32_t turn = 0;; ++turn) {
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaSuccess) return "";
    if (error != cudaErrorNotReady) return std::string("a kernel ended in ") + cudaGetErrorName(error);
    if (deadline.passed(Clock::now())) return "a kernel did not end within " + std::to_string(most.count()) + " ms";
    if (turn > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Captured::Captured(const Stream& stream, const std::function<void()>& launches) {
  must(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  try {
    launches();
  } catch (...) {
    cudaGraph_t broken = nullptr;
    (void)cudaStreamEndCapture(stream.get(), &broken);
    throw;
  }
  must(cudaStreamEndCapture(stream.get(), &graph_), "cudaStreamEndCapture");
  must(cudaGraphInstantiate(&ready_, graph_, 0), "cudaGraphInstantiate");
  must(cudaGraphUpload(ready_, stream.get()), "cudaGraphUpload");
}

Captured::~Captured() {
  cudaGraphExecDestroy(ready_);
  cudaGraphDestroy(graph_);
}

Timer::Timer() {
  must(cudaEventCreate(&begin_), "cudaEventCreate");
  must(cudaEventCreate(&end_), "cudaEventCreate");
}

Timer::~Timer() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}

double Timer::us() const {
  float ms = 0;
  must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
  return double(ms) * 1e3;
}

double time_of(const Stream& stream, int times, int rounds, const std::function<void()>& launch) {
  constexpr std::chrono::milliseconds kMost{20'000};
  std::vector<double> us;
  for (int round = -1; round < rounds; ++round) {  // the first round is warm-up
    Timer timer;
    timer.start(stream);
    for (int i = 0; i < times; ++i) launch();
    timer.stop(stream);
    if (const std::string wrong = stream.wait(kMost); !wrong.empty()) throw Error(Code::kTimeout, "nvx: " + wrong);
    if (round >= 0) us.push_back(timer.us() / times);
  }
  std::nth_element(us.begin(), us.begin() + long(us.size() / 2), us.end());
  return us[us.size() / 2];
}

}  // namespace nvx::gpu
