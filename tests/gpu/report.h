#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "base/deadline.h"

/// Output of the GPU tests on a machine with GPUs. Each part is a process that prints its findings as JSON, one object
/// a line, as it runs.
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

/// Reports the progress of a part on standard output. The output ends in exactly one line with "end": passed, failed or
/// skipped. A part without that line has crashed.
class Report {
 public:
  Report(std::string part, std::chrono::milliseconds span);

  void print(const Line& line) const { print(line.text()); }
  /// Prints an object that another process has written.
  void print(const std::string& object) const;
  /// Counts one check; `wrong` is empty if it passed. Only the first failures are printed.
  bool check(const std::string& what, const std::string& wrong);
  bool has_time() const { return Clock::now() < end_; }
  std::chrono::milliseconds time_left() const;
  /// Records that a check was left out because time ran out.
  void cut_short(const std::string& what);
  uint64_t tried() const { return tried_; }
  uint64_t failed() const { return failed_; }

  /// The exit code. A part without checks has failed.
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
