#pragma once

namespace nvx {

enum class LogLevel { kWarn, kInfo, kTrace };

/// What NVX_DEBUG lets through.
bool logs(LogLevel level);

/// One line to stderr in one write: "nvx[pid] text".
[[gnu::format(printf, 1, 2)]] void log_line(const char* format, ...);

}  // namespace nvx

#define NVX_LOG(level, ...)                                                \
  do {                                                                     \
    if (::nvx::logs(::nvx::LogLevel::level)) ::nvx::log_line(__VA_ARGS__); \
  } while (0)
