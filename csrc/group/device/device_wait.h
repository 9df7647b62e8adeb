#pragma once

#include <chrono>
#include <optional>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/flag.h"

namespace nvx {

inline constexpr const char* kCheckDevice =
    "check what that device does, and whether the timeout is long enough (NVX_TIMEOUT_S, nvx.set_timeout)";

/// Polls until `ready()` holds; false if the deadline passes first. Pauses grow, as most waits take microseconds.
template <class Ready>
bool poll_until(const Ready& ready, const Deadline& deadline) {
  constexpr int kAtOnce = 256, kOften = 4096;
  for (int polls = 0; !ready(); polls += polls < kOften) {
    if (deadline.passed(Clock::now())) return false;
    if (polls < kAtOnce) {
      relax();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(polls < kOften ? 20 : 100));
    }
  }
  return true;
}

/// Waits for a device during an operation: polls until `ready()` holds, and `ready()` may advance the operation.
/// Leaving and set-up have bounded waits of their own. Returns ok, or the failure of the group on the device or
/// elsewhere, including Ctrl-C; nothing if the deadline passes first. `Failures`: FailureState or Group. `Device`:
/// DeviceCommunicator.
template <class Failures, class Device, class Ready>
std::optional<Status> wait_on_device(Failures& failures, Device& device, const Ready& ready, const Deadline& deadline) {
  constexpr int kRarely = 256;  // checks between two checks for Ctrl-C
  Status wrong;
  int polls = 0;
  const bool in_time = poll_until(
      [&] {
        if (ready()) return true;
        if (++polls % kRarely == 0) failures.check_interrupt();
        wrong = device.check_kernels();
        if (wrong.ok()) wrong = failures.check_alive();
        if (failures.failed()) wrong = failures.failure();  // check_alive() speaks of calls that have not begun
        return !wrong.ok();
      },
      deadline);
  return in_time ? std::optional<Status>(wrong) : std::nullopt;
}

template <class Group, class Ready>
std::optional<Status> wait_on_device(Group& group, const Ready& ready, const Deadline& deadline) {
  return wait_on_device(group, group.device(), ready, deadline);
}

}  // namespace nvx
