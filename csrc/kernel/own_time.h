#pragma once

#include <sys/resource.h>

#include <chrono>
#include <cstddef>

#include "base/deadline.h"

namespace nvx::kernel {

/// How long this thread takes for something.
class OwnTime {
 public:
  /// bytes: how much it moves.
  explicit OwnTime(size_t bytes) : lasts_(bytes >= kLasts), before_(lasts_ ? interruptions() : 0) {}

  std::chrono::duration<double> passed() const { return Clock::now() - began_; }

  /// Whether that says what the work costs: not if the thread has lost its core to another one meanwhile, but for now
  /// and then in a long time.
  bool is_telling() const { return !lasts_ || interruptions() - before_ <= passed() / kBetween; }

 private:
  /// What moves as much may well be interrupted, and asking whether it was costs little beside it.
  static constexpr size_t kLasts = 64 << 10;
  static constexpr std::chrono::milliseconds kBetween{2};

  static long interruptions() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
  }

  bool lasts_;
  long before_;
  Clock::time_point began_ = Clock::now();
};

}  // namespace nvx::kernel
