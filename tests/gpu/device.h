#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"

/// RAII wrappers of CUDA objects, with checked calls. Every wait is bounded.
namespace nvx::gpu {

/// Throws Error with CUDA's error text.
void must(cudaError_t error, const char* what);

/// Zeroed memory of the device, or pinned memory of the host.
class Memory {
 public:
  enum class Where { kDevice, kPinned };
  explicit Memory(size_t bytes, Where where = Where::kDevice);
  ~Memory();
  Memory(const Memory&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
  Where where_;
};

/// A bump allocator. After a reset, the same sequence of requests gets the same addresses.
class Heap {
 public:
  explicit Heap(size_t bytes) : memory_(bytes) {}
  /// Memory `phase` bytes behind a multiple of 256. Throws Error when it is full.
  std::byte* take(size_t bytes, size_t phase = 0);
  void reset() { used_ = 0; }

 private:
  Memory memory_;
  size_t used_ = 0;
};

/// A stream that does not synchronize with others.
class Stream {
 public:
  Stream();
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  /// Empty: all work has ended. Otherwise the reason; unfinished work may continue.
  std::string wait(std::chrono::milliseconds most) const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// A captured sequence of launches on one stream.
class Captured {
 public:
  Captured(const Stream& stream, const std::function<void()>& launches);
  ~Captured();
  Captured(const Captured&) = delete;
  void replay(const Stream& stream) const { must(cudaGraphLaunch(ready_, stream.get()), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

/// The time between two points of a stream.
class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  void start(const Stream& stream) { must(cudaEventRecord(begin_, stream.get()), "cudaEventRecord"); }
  void stop(const Stream& stream) { must(cudaEventRecord(end_, stream.get()), "cudaEventRecord"); }
  /// Valid after the stream has passed both points.
  double us() const;

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// The time of one of several successive launches on the stream: the median of rounds. Throws Error if one does not
/// end.
double time_of(const Stream& stream, int times, int rounds, const std::function<void()>& launch);

}  // namespace nvx::gpu
