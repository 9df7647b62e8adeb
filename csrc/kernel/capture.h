#pragma once

#include <cstdint>

#include "base/error.h"

/// Streams under capture, whose work is kept in a graph instead of being run, as CUDA has them. Without CUDA in the
/// build nothing is ever captured.
namespace nvx::kernel {

/// The capture that a stream (a cudaStream_t) is in; 0: none. A capture that has failed already counts as one.
uint64_t capture_of(void* stream);

/// Stands behind the last launch of a channel, whatever stream that was on, and whether a graph has begun it: so
/// launches of a channel do not overlap. Used on one device, by one thread at a time.
class Tail {
 public:
  /// What the stream is given next waits for it. Captured: each replay waits for what was begun before that.
  Status hold_back(void* stream, bool captured);
  /// It stands behind what the stream has been given so far. Captured: behind that of each replay, once that is begun.
  Status put_behind(void* stream, bool captured);
  /// Whether it has been passed; true where nobody can tell any more. Of a thread that may ask beside captures.
  bool passed() const;

 private:
  Status make();

  void* event_ = nullptr;  // never destroyed: graphs may have it
};

}  // namespace nvx::kernel
