#include "base/log.h"

#include <unistd.h>

#include <algorithm>
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
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, used);
}

}  // namespace nvx
