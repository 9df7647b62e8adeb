#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "group/device/device_wait.h"

namespace nvx {

/// The stream that something is launched on.
struct LaunchStream {
  void* native = nullptr;         ///< a cudaStream_t, of this rank's device
  uint64_t capture = 0;           ///< the capture that the stream is in; 0: none
  std::array<int64_t, 3> name{};  ///< by which its StreamOrder knows the stream
};

/// Keeps a group's launches on a device in order, whatever streams they are on: kernels of a channel must not overlap.
/// It knows the streams and makes the events, which torch does.
class StreamOrder {
 public:
  virtual ~StreamOrder() = default;
  /// Before a launch: has the stream wait for what was launched on other streams, and by graphs.
  virtual Status follow(const LaunchStream& stream) = 0;
  /// After a launch, also after one that was refused, as part of it may have begun: later launches come behind what the
  /// stream has been given so far.
  virtual Status note(const LaunchStream& stream) = 0;
  /// Whether all that was launched is known to have ended, well or not. Kernels that ended badly do not say so
  /// themselves: without this, what they used is not used again.
  virtual bool ended() = 0;
  /// Whether no graph is running that has launches in it, as far as that can be known.
  virtual bool replays_ended() { return ended(); }

  /// Waits so long until all has ended. Where that was in vain once, later calls do not wait.
  bool await_end(std::chrono::milliseconds most) {
    if (gave_up_.load() || !look_until([&] { return ended() || gave_up_.load(); }, Deadline::after(most)))
      gave_up_.store(true);
    return !gave_up_.load();
  }

 private:
  std::atomic<bool> gave_up_{false};
};

}  // namespace nvx
