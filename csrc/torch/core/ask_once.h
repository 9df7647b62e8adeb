#pragma once

#include <c10/core/Device.h>

#include <atomic>

#include "base/mutex.h"

namespace nvx {

/// A question about the device that a rank uses, such as "do kernels serve it?", which the ranks of a group answer
/// together, once, in a collective call. The first caller makes it; other threads of this rank wait for it.
class AskOnce {
 public:
  /// The answer; calls `ask` to find it if there is none. If `ask` throws, the next caller asks again.
  template <class Ask>
  bool answer(at::Device device, Ask&& ask) EXCLUDES(mutex_) {
    if (answer_ == Answer::kUnknown) find_out(device, ask);
    return says_yes();
  }

  bool is_answered() const { return answer_ != Answer::kUnknown; }
  bool says_yes() const { return answer_ == Answer::kYes; }
  /// The device that was asked about. Valid only if the answer is yes.
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
  at::Device device_{at::kCPU};  // written once, before `answer_`: a thread that loads the answer sees the device
};

}  // namespace nvx
