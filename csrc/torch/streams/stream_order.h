#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <optional>

#include "base/mutex.h"
#include "group/device/stream_order.h"
#include "kernel/gpu/capture.h"
#include "torch/streams/pooled_event.h"

namespace nvx {

/// Converts the stream for a launch on it. capture: of the stream; 0: none.
LaunchStream launch_stream(const c10::Stream& stream, uint64_t capture);

/// Tracks the stream of a group's last launch, and makes another stream wait for that launch. All launches of one order
/// are on one device.
class TorchStreamOrder final : public StreamOrder {
 public:
  /// Call when the device opens: records the event, on an idle stream. A graph may be the first to wait for it.
  Status begin(at::Device device) EXCLUDES(mutex_);
  Status follow(const LaunchStream& stream) override EXCLUDES(mutex_);
  Status note(const LaunchStream& stream) override EXCLUDES(mutex_);
  bool ended() override EXCLUDES(mutex_);
  bool passed(const kernel::TailEvent& event) override;
  /// Whether anything has been captured, and may therefore be replayed at any time.
  bool has_graphs() EXCLUDES(mutex_);

 private:
  /// block() makes the stream wait for the last launch; record() makes the stream's current position that of the last
  /// launch.
  Status block(const LaunchStream& stream) REQUIRES(mutex_);
  Status record(const LaunchStream& stream) REQUIRES(mutex_);

  std::atomic<c10::DeviceIndex> device_{-1};  // of the launches; -1: none yet
  Mutex mutex_;
  kernel::TailEvent tail_ GUARDED_BY(mutex_);             // the last launch, if there are kernels
  PooledEvent last_ GUARDED_BY(mutex_);                   // the same if there are none: see may_have_kernels()
  std::optional<c10::Stream> stream_ GUARDED_BY(mutex_);  // of the last launch outside captures
  bool has_graphs_ GUARDED_BY(mutex_) = false;
  /// The current or last capture. Its launches follow each other inside it.
  struct Capture {
    uint64_t id = 0;
    std::optional<c10::Event> last;
    std::optional<c10::Stream> stream;
  };
  Capture capture_ GUARDED_BY(mutex_);
};

}  // namespace nvx
