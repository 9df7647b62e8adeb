#pragma once

#include <c10/core/Device.h>

#include <atomic>

#include "base/mutex.h"

namespace nvx {

/// A question about the device that a rank uses, which the ranks of a group answer together, and once: "do kernels
/// serve it?" Asking it is a step of all ranks. The first caller takes that step, and waits in it for the other ranks;
/// other threads of this rank wait for the first caller.
class AskOnce {
 public:
  /// The answer, which `ask` finds out where nobody has asked yet. If `ask` throws there is still no answer, and
  /// whoever comes next asks again.
  template <class Ask>
  bool answer(at::Device device, Ask&& ask) EXCLUDES(mutex_) {
    if (answer_ == Answer::kUnknown) find_out(device, ask);
    return says_yes();
  }

  bool is_answered() const { return answer_ != Answer::kUnknown; }
  bool says_yes() const { return answer_ == Answer::kYes; }
  /// The device that was asked about; only where the answer is yes.
  at::Device device() const { return device_; }

 private:
  enum class Answer { kUnknown, kYes, kNo };

  template <class Ask>
  void find_out(at::Device device, Ask& ask) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (answer_ != Answer::kUnknown) return;
    const bool yes = ask();
    device_ = device;
    answer_ = yes ? Answer::kYes : Answer::kNo;
  }

  Mutex mutex_;
  std::atomic<Answer> answer_{Answer::kUnknown};
  at::Device device_{at::kCPU};  // written before the answer is, and never again
};

}  // namespace nvx
