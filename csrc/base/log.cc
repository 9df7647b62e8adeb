#include "base/log.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace nvx {

bool logs(LogLevel level) {
  static const LogLevel kLevel = [] {
    const char* set = std::getenv("NVX_DEBUG");
    if (set && strcasecmp(set, "trace") == 0) return LogLevel::kTrace;
    if (set && strcasecmp(set, "info") == 0) return LogLevel::kInfo;
    return LogLevel::kWarn;
  }();
  return level <= kLevel;
}

void log_line(const char* format, ...) {
  char line[1024];
  int used = std::snprintf(line, sizeof line, "nvx[%d] ", int(getpid()));
  va_list args;
  va_start(args, format);
  used += std::vsnprintf(line + used, sizeof line - used - 1, format, args);
  va_end(args);
  used = std::min<int>(used, sizeof line - 2);
  line[used++] = '\n';
  // Callers hold locks, and a reader that has stopped may never read again: only the first line waits for it.
  constexpr int kGraceMs = 50;
  static std::atomic<bool> dropped{false};
  pollfd out{STDERR_FILENO, POLLOUT, 0};
  dropped = poll(&out, 1, dropped ? 0 : kGraceMs) == 0;
  // The line is shorter than PIPE_BUF, so a pipe that has room takes all of it, unless another writer is faster.
  if ((out.revents & POLLOUT) == 0) return;
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, used);
}

}  // namespace nvx
