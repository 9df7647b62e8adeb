#pragma once

#include <poll.h>
#include <sys/eventfd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "base/error.h"
#include "base/handle.h"

namespace nvx::net {

/// Wakes the threads that wait for a descriptor. A ring without a sleeper ends the next sleep.
class Bell {
 public:
  Bell() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) throw system_error("cannot make an eventfd");
  }

  void ring() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t put = write(fd_.get(), &one, sizeof one);
  }

  /// Sleeps until the descriptor is readable, the bell is rung, or the span is over.
  void sleep(int fd, std::chrono::microseconds span) {
    const timespec time{time_t(span.count() / 1'000'000), long(span.count() % 1'000'000 * 1000)};
    pollfd fds[] = {{fd_.get(), POLLIN, 0}, {fd, POLLIN, 0}};
    sleepers_.fetch_add(1);
    ppoll(fds, 2, &time, nullptr);
    // Only the last sleeper resets the bell, so that one ring ends all sleeps.
    if (sleepers_.fetch_sub(1) != 1 || !(fds[0].revents & POLLIN)) return;
    uint64_t rings;
    [[maybe_unused]] const ssize_t got = read(fd_.get(), &rings, sizeof rings);
  }

 private:
  Fd fd_;
  std::atomic<int> sleepers_{0};
};

}  // namespace nvx::net
