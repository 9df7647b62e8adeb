#pragma once

namespace nvx {

enum class LogLevel { kWarn, kInfo, kTrace };

/// Whether NVX_DEBUG enables this level.
bool logs(LogLevel level);

/// Writes one line to stderr with one write(): "nvx[pid] text". Drops it if stderr has no room.
[[gnu::format(printf, 1, 2)]] void log_line(const char* format, ...);

}  // namespace nvx

#define NVX_LOG(level, ...)                                                \
  do {                                                                     \
    if (::nvx::logs(::nvx::LogLevel::level)) ::nvx::log_line(__VA_ARGS__); \
  } while (0)
