#pragma once

#include <cstdint>

#include "base/error.h"

/// Streams under capture, whose work is kept in a graph instead of being run, as CUDA has them. Without CUDA in the
/// build nothing is ever captured.
namespace nvx::kernel {

/// The capture that a stream (a cudaStream_t) is in; 0: none. A capture that has failed already counts as one.
uint64_t capture_of(void* stream);

/// Has the host call this when the stream comes to it: in a capture, in each replay. It must not wait, nor ask the
/// device anything; and the stream waits until it has returned.
Status call_host(void* stream, void (*what)(void*), void* with);

/// A mark behind the last launch of a channel, on whatever stream that was, and whether a call or a graph has begun it.
/// It keeps launches of a channel from overlapping. Used on one device, by one thread at a time.
class Tail {
 public:
  /// Has what the stream is given next wait for the mark. Captured: each replay waits for what was begun before it.
  Status hold_back(void* stream, bool captured);
  /// Moves the mark behind what the stream has been given so far. Captured: each replay moves it behind its own work
  /// when it is begun.
  Status put_behind(void* stream, bool captured);
  /// Whether the device has passed the mark; true where nobody can tell any more. For threads that may ask beside
  /// captures (memory/driver/beside_captures.h).
  bool passed() const;

 private:
  Status make();

  void* event_ = nullptr;  // never destroyed: graphs may have it
};

}  // namespace nvx::kernel
