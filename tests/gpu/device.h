#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"

/// CUDA's own things, checked, and given back. Nothing here waits without an end.
namespace nvx::gpu {

/// Throws Error with CUDA's words.
void must(cudaError_t error, const char* what);

/// Memory of the device or, pinned, of the host; zeroed.
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

/// A memory handed out from its beginning, and all of it anew after a reset: what is asked for in the same order lies
/// in the same place.
class Heap {
 public:
  explicit Heap(size_t bytes) : memory_(bytes) {}
  /// `phase` bytes behind a multiple of 256. Throws Error when it is full.
  std::byte* take(size_t bytes, size_t phase = 0);
  void reset() { used_ = 0; }

 private:
  Memory memory_;
  size_t used_ = 0;
};

/// Does not wait for others.
class Stream {
 public:
  Stream();
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  /// Empty: all that was begun has ended. Else why not; what has not may go on.
  std::string wait(std::chrono::milliseconds most) const;

 private:
  cudaStream_t stream_ = nullptr;
};

/// The time between two points of a stream.
class Timer {
 public:
  Timer();
  ~Timer();
  Timer(const Timer&) = delete;
  void start(const Stream& stream) { must(cudaEventRecord(begin_, stream.get()), "cudaEventRecord"); }
  void stop(const Stream& stream) { must(cudaEventRecord(end_, stream.get()), "cudaEventRecord"); }
  /// Once the stream has come past both.
  double us() const;

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// One of several launches in a row, each of them `launch`ed on the stream: the median of rounds. Throws Error when one
/// does not end.
double time_of(const Stream& stream, int times, int rounds, const std::function<void()>& launch);

}  // namespace nvx::gpu
