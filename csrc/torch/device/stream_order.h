#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

#include "base/mutex.h"
#include "group/device/stream_order.h"
#include "kernel/gpu/capture.h"

namespace nvx {

/// The stream, for a launch on it. capture: the one that the stream is in; 0: none.
LaunchStream launch_stream(const c10::Stream& stream, uint64_t capture);

/// Knows the stream that a group launched on last, and has another stream wait for that launch. All launches of one
/// order are on one device.
class TorchStreamOrder final : public StreamOrder {
 public:
  Status follow(const LaunchStream& stream) override EXCLUDES(mutex_);
  Status note(const LaunchStream& stream) override EXCLUDES(mutex_);
  bool ended() override EXCLUDES(mutex_);
  /// Whether anything has been captured, and so may be replayed at any time.
  bool has_graphs() EXCLUDES(mutex_);

 private:
  /// Has the stream wait for what was launched last; notes that what it has been given now is what was launched last.
  Status hold_back(const LaunchStream& stream) REQUIRES(mutex_);
  Status put_behind(const LaunchStream& stream) REQUIRES(mutex_);

  Mutex mutex_;
  kernel::Tail tail_ GUARDED_BY(mutex_);                  // what was launched last, where there are kernels
  std::optional<c10::Event> last_ GUARDED_BY(mutex_);     // the same where there are none: see may_have_kernels()
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);  // that of the last launch that was not captured
  bool has_graphs_ GUARDED_BY(mutex_) = false;
  /// The capture under way, or the last one. Its launches follow each other inside it.
  struct Capture {
    uint64_t id = 0;
    std::optional<c10::Event> last;
    std::optional<c10::Stream> stream;
  };
  Capture capture_ GUARDED_BY(mutex_);
};

}  // namespace nvx
