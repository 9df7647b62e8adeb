#pragma once

#include <c10/core/Device.h>

#include <atomic>

#include "base/mutex.h"
#include "torch/core/argument_error.h"
#include "torch/core/holder.h"

namespace nvx {

/// A decision about the device that a rank uses, such as whether kernels serve it. The ranks of a group make it
/// together, once, in a collective call. The first caller makes that call; other threads of this rank wait for it.
class AgreeOnce {
 public:
  /// The decision; calls `decide` to make it if there is none. If `decide` throws, the next caller tries again.
  template <class Decide>
  bool agree(at::Device device, Decide&& decide) EXCLUDES(mutex_) {
    if (is_decided()) return is_yes();
    if (holder_.is_this_thread()) {
      throw_argument_error("nvx: re-entrant call: this thread is inside the first operation of the same group on ",
                           device,
                           " already (in a signal handler?), so waiting for the call would deadlock. Next: "
                           "call it when the operation has returned, or abort the group");
    }
    MutexLock lock(mutex_);
    if (is_decided()) return is_yes();
    const auto held = holder_.hold();
    const bool yes = decide();
    device_ = device;
    decision_ = yes ? Decision::kYes : Decision::kNo;
    return yes;
  }

  bool is_decided() const { return decision_ != Decision::kNone; }
  bool is_yes() const { return decision_ == Decision::kYes; }
  /// The device of the decision. Valid only if it is yes.
  at::Device device() const { return device_; }

 private:
  enum class Decision { kNone, kYes, kNo };

  Mutex mutex_;
  Holder holder_;  // of `mutex_`
  std::atomic<Decision> decision_{Decision::kNone};
  at::Device device_{at::kCPU};  // written once, before `decision_`: a thread that loads the decision sees the device
};

}  // namespace nvx
