#pragma once

namespace nvx {

/// While an object of this class lives, its thread may make CUDA calls although another thread is capturing a stream
/// into a graph. Without it CUDA refuses calls that are unsafe during a capture, such as querying an event, and
/// invalidates the capture. It does not permit queries of the captured work itself. It is cheap and can be nested.
class RelaxedCaptureGuard {
 public:
  RelaxedCaptureGuard();
  ~RelaxedCaptureGuard();
  RelaxedCaptureGuard(const RelaxedCaptureGuard&) = delete;

 private:
  const int before_;
};

/// Whether a stream (a cudaStream_t) of the thread's current device is being captured, as far as the driver says. False
/// while the driver is not loaded in this process.
bool is_captured(void* stream);

}  // namespace nvx
