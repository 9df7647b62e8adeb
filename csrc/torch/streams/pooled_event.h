#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace nvx {

/// An event from a pool, to which it returns in the end, because to make and to destroy an event costs the host more
/// than to record it. Each call runs on the event's device: on a thread that has chosen no device, such as nvx's own,
/// CUDA would create a context on the first device, which costs memory there and may be refused.
class PooledEvent {
 public:
  /// timed: for ms_until().
  explicit PooledEvent(bool timed = false) : timed_(timed) {}
  ~PooledEvent();

  void record(const c10::Stream& stream);
  bool is_recorded() const { return event_.has_value(); }
  /// Makes the stream wait for the event. An event that was not recorded has passed.
  void block(const c10::Stream& stream) const {
    const c10::OptionalDeviceGuard on(stream.device());
    if (event_) event_->block(stream);
  }
  bool query() const {
    if (!event_) return true;
    const c10::OptionalDeviceGuard on(event_->device());
    return event_->query();
  }
  /// Both must have been recorded and have passed.
  double ms_until(const PooledEvent& later) const {
    const c10::OptionalDeviceGuard on(event_->device());
    return event_->elapsedTime(*later.event_);
  }

 private:
  const bool timed_;
  std::optional<c10::Event> event_;  // empty until the first record
};

}  // namespace nvx
