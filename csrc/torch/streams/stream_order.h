#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

#include "base/deadline.h"
#include "base/mutex.h"
#include "group/device/stream_order.h"
#include "kernel/gpu/capture.h"

namespace nvx {

class StagingCopies;

/// The stream of a call, for launches on it.
LaunchStream launch_stream(const StagingCopies& staging);

/// Tracks the stream of a group's last launch, and makes another stream wait for that launch. All launches of one order
/// are on one device. The last launch gets an event only when another stream needs it, if its stream lasts and there
/// are no graphs: on one stream a call is one launch and nothing else.
class TorchStreamOrder final : public StreamOrder, public std::enable_shared_from_this<TorchStreamOrder> {
 public:
  Status follow(const LaunchStream& stream) override EXCLUDES(mutex_);
  Status note(const LaunchStream& stream) override EXCLUDES(mutex_);
  bool ended() override EXCLUDES(mutex_);
  void note_report() override EXCLUDES(mutex_);
  /// Whether anything has been captured, and may therefore be replayed at any time.
  bool has_graphs() EXCLUDES(mutex_);

 private:
  bool is_last_on(const LaunchStream& stream) EXCLUDES(mutex_);
  /// Gives the last launch its event, before another group's kernels follow on its stream.
  void mark() EXCLUDES(mutex_);
  /// hold_back() makes the stream wait for the last launch; put_behind() records the stream's current position as the
  /// last launch.
  Status hold_back(const LaunchStream& stream) REQUIRES(mutex_);
  Status put_behind(const LaunchStream& stream) REQUIRES(mutex_);
  Status put_behind_last() REQUIRES(mutex_);

  Mutex mutex_;
  kernel::Tail tail_ GUARDED_BY(mutex_);                          // the last launch, if there are kernels
  std::optional<c10::Event> last_ GUARDED_BY(mutex_);             // the same if there are none: see may_have_kernels()
  std::optional<LaunchStream> stream_ GUARDED_BY(mutex_);         // of the last launch outside captures
  bool has_event_ GUARDED_BY(mutex_) = true;                      // `tail_` or `last_` is behind that launch
  std::optional<Clock::time_point> reported_ GUARDED_BY(mutex_);  // its end, by the device
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
