#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "base/error.h"
#include "group/device/device_wait.h"
#include "kernel/gpu/capture.h"

namespace nvx {

struct LaunchStream {
  void* native = nullptr;         ///< a `cudaStream_t` of this rank's device
  uint64_t capture = 0;           ///< the stream's current capture; 0: none
  std::array<int64_t, 3> name{};  ///< the stream's id in its StreamOrder
};

/// Orders a group's launches across streams, since kernels of a channel must not overlap. Torch owns the streams.
class StreamOrder {
 public:
  virtual ~StreamOrder() = default;
  /// Call before a launch: the stream waits for earlier launches on other streams, and for those of graphs.
  virtual Status follow(const LaunchStream& stream) = 0;
  /// Call after a launch, also a refused one, which may have begun in part: later launches wait for the stream so far.
  virtual Status note(const LaunchStream& stream) = 0;
  /// Runs `launch` between both.
  template <class Launch>
  Status launch_on(const LaunchStream& stream, const Launch& launch) {
    NVX_TRY(follow(stream));
    const Status begun = launch();
    const Status noted = note(stream);
    return begun.ok() ? noted : begun;
  }
  /// Whether the streams are known to have passed all launches, well or not, and no graph that contains launches is
  /// running, as far as it can be known. Memory that kernels access, here or on peers, is not reused before this is
  /// true: a kernel that ends badly does not report it, and the report of one that ends well may overtake its last
  /// stores.
  virtual bool ended() = 0;
  /// Queries an event of the launches' device, on any thread.
  virtual bool passed(const kernel::TailEvent& event) = 0;

  /// Waits up to `most` until all has ended. After one timeout, later calls do not wait.
  bool await_end(std::chrono::milliseconds most) {
    if (gave_up_.load() || !poll_until([&] { return ended() || gave_up_.load(); }, Deadline::after(most)))
      gave_up_.store(true);
    return !gave_up_.load();
  }

 private:
  std::atomic<bool> gave_up_{false};
};

}  // namespace nvx
