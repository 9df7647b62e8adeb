#pragma once

#include <sys/resource.h>

#include <chrono>
#include <cstddef>
#include <optional>

#include "base/deadline.h"

namespace nvx::kernel {

/// Measures how long this thread takes to move `bytes` bytes, from construction on.
class OwnTime {
 public:
  using Seconds = std::chrono::duration<double>;

  explicit OwnTime(size_t bytes) : before_(bytes >= kLasts ? usage() : Usage{}), counts_(bytes >= kLasts) {}

  /// Nothing if the thread lost its core meanwhile, which is not part of the cost. Rare interruptions are tolerated.
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

  /// From this size on, interruptions are likely and the system call that detects them is comparatively cheap.
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
