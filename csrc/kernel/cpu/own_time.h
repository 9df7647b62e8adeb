#pragma once

#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <optional>

#include "base/deadline.h"

namespace nvx::kernel {

/// How long this thread takes for something that moves so many bytes, from now on.
class OwnTime {
 public:
  using Seconds = std::chrono::duration<double>;

  explicit OwnTime(size_t bytes) : before_(bytes >= kLasts ? usage() : Usage{}), counts_(bytes >= kLasts) {}

  /// Nothing if the thread has lost its core to another one meanwhile, as that is no part of what the work costs. Once
  /// in a long while does not matter.
  std::optional<Seconds> spent() const {
    const Seconds spent = Clock::now() - began_;
    if (!counts_) return spent;
    const Usage now = usage();
    if (double(now.interruptions - before_.interruptions) > (now.at_work - before_.at_work) / kBetween) return {};
    return spent;
  }

 private:
  struct Usage {
    long interruptions = 0;
    std::chrono::microseconds at_work{};
  };

  /// What moves as much may well be interrupted, and asking whether it was costs little beside it.
  static constexpr size_t kLasts = 64 << 10;
  static constexpr std::chrono::duration<double, std::milli> kBetween{2};

  static Usage usage() {
    rusage now{};
    getrusage(RUSAGE_THREAD, &now);
    const auto time = [](const timeval& t) {
      return std::chrono::seconds(t.tv_sec) + std::chrono::microseconds(t.tv_usec);
    };
    return {now.ru_nivcsw, time(now.ru_utime) + time(now.ru_stime)};
  }

  Usage before_;
  bool counts_;
  Clock::time_point began_ = Clock::now();
};

}  // namespace nvx::kernel
