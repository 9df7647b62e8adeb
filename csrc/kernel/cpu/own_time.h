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

  explicit OwnTime(size_t bytes) : before_(bytes >= kCountsFrom ? usage() : Usage{}), counts_(bytes >= kCountsFrom) {}

  /// Nothing if other threads took the core more often than once per kInterruptionInterval: the time is then not a cost
  /// of the work.
  std::optional<Seconds> spent() const {
    const Seconds spent = Clock::now() - began_;
    if (!counts_) return spent;
    const Usage now = usage();
    if (double(now.interruptions - before_.interruptions) > (now.cpu_time - before_.cpu_time) / kInterruptionInterval)
      return {};
    return spent;
  }

 private:
  struct Usage {
    long interruptions = 0;
    std::chrono::microseconds cpu_time{};
  };

  /// The size from which interruptions are counted: they are likely, and the system call is comparatively cheap.
  static constexpr size_t kCountsFrom = 64 << 10;
  static constexpr std::chrono::duration<double, std::milli> kInterruptionInterval{2};

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
