#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/deadline.h"

/// What the GPU tests runs on a machine with GPUs. One part of it a process; a part says what it finds in JSON, one
/// object a line, as it goes.
namespace nvx::gpu {

/// One object, field by field.
class Line {
 public:
  Line& add(const char* name, const std::string& text);
  Line& add(const char* name, const char* text) { return add(name, std::string(text)); }
  Line& add(const char* name, double number);
  Line& add(const char* name, int number) { return add_raw(name, std::to_string(number)); }
  Line& add(const char* name, uint32_t number) { return add_raw(name, std::to_string(number)); }
  Line& add(const char* name, uint64_t number) { return add_raw(name, std::to_string(number)); }
  Line& add(const char* name, bool flag) { return add_raw(name, flag ? "true" : "false"); }
  std::string text() const { return "{" + fields_ + "}"; }

 private:
  Line& add_raw(const char* name, const std::string& value);
  std::string fields_;
};

/// How a part goes, on standard output. It ends in exactly one line with "end": passed, failed or skipped; a part that
/// ends without one has broken down.
class Report {
 public:
  Report(std::string part, std::chrono::milliseconds span);

  void say(const Line& line) const { proxy(line.text()); }
  /// An object that another process has written.
  void proxy(const std::string& object) const;
  /// One thing that was tried; wrong: empty where it went well. Failures are printed, the first of them.
  bool check(const std::string& what, const std::string& wrong);
  bool has_time() const { return Clock::now() < end_; }
  std::chrono::milliseconds time_left() const;
  /// Something was left out because time ran out.
  void cut_short(const std::string& what);
  uint64_t tried() const { return tried_; }
  uint64_t failed() const { return failed_; }

  /// The exit code. Nothing tried is a failure.
  int finish() const;
  int skip(const std::string& why) const;
  int break_down(const std::string& why) const;

 private:
  int close(const char* end, const std::string& why) const;

  std::string part_;
  Clock::time_point began_;
  Clock::time_point end_;
  uint64_t tried_ = 0;
  uint64_t failed_ = 0;
  uint64_t cut_ = 0;
};

}  // namespace nvx::gpu
