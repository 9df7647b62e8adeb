#pragma once

#include <cstdint>

#include "base/error.h"

/// Streams under CUDA capture, whose work a graph records.
namespace nvx::kernel {

/// The capture of a stream (a cudaStream_t) of the thread's current device, or 0 if it is not capturing. An invalidated
/// capture counts as one. In a build without CUDA, the driver answers, and all captures are UINT64_MAX.
uint64_t capture_of(void* stream);

/// Enqueues a host function; in a capture, for each replay. It must not wait or call CUDA: the stream waits for it.
Status call_host(void* stream, void (*what)(void*), void* with);

/// An event after the last launch of a channel, on any stream, from a call or a graph. It keeps the launches of a
/// channel from overlapping. Used on one device, by one thread at a time.
class TailEvent {
 public:
  /// Makes the stream's next work wait for the event. Captured: each replay waits for the launches that precede it.
  Status block(void* stream, bool captured);
  /// Records the event after the stream's current work. capture: of the stream; 0: none. If captured, each replay
  /// records it again, beside later work. A capture has one record, behind the work of all calls.
  Status record(void* stream, uint64_t capture);
  /// Whether the device has passed the event; true also if that can no longer be queried. Only for threads whose
  /// current device is the event's, and that may query events during captures (memory/driver/relaxed_capture_guard.h).
  bool passed() const;

 private:
  Status make();

  void* event_ = nullptr;   // never destroyed: graphs may refer to it
  uint64_t capture_ = 0;    // the last one with a record
  void* record_ = nullptr;  // the graph node of that record
};

}  // namespace nvx::kernel
