#include "gpu/report.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>

namespace nvx::gpu {
namespace {

constexpr uint64_t kShown = 20;  // failures that are printed in full

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    char code[8];
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (uint8_t(c) < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", unsigned(uint8_t(c)));
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace

Line& Line::add_raw(const char* name, const std::string& value) {
  fields_ += (fields_.empty() ? "" : ", ") + quoted(name) + ": " + value;
  return *this;
}

Line& Line::add(const char* name, const std::string& text) { return add_raw(name, quoted(text)); }

Line& Line::add(const char* name, double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", number);
  return add_raw(name, std::isfinite(number) ? text : "null");
}

Report::Report(std::string part, std::chrono::milliseconds span)
    : part_(std::move(part)), began_(Clock::now()), end_(began_ + span) {}

void Report::print(const std::string& object) const {
  const std::string text = object + "\n";
  for (size_t at = 0; at < text.size();) {  // in one write if possible, because several processes may print
    const ssize_t written = ::write(STDOUT_FILENO, text.data() + at, text.size() - at);
    if (written <= 0) return;
    at += size_t(written);
  }
}

bool Report::check(const std::string& what, const std::string& wrong) {
  ++tried_;
  if (wrong.empty()) return true;
  if (++failed_ <= kShown) print(Line().add("part", part_).add("failed", what).add("why", wrong));
  return false;
}

std::chrono::milliseconds Report::time_left() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
}

void Report::cut_short(const std::string& what) {
  ++cut_;
  print(Line().add("part", part_).add("left_out", what).add("why", "time ran out"));
}

int Report::close(const char* end, const std::string& why) const {
  Line line;
  line.add("part", part_).add("end", end);
  if (!why.empty()) line.add("why", why);
  line.add("tried", tried_).add("failed", failed_).add("left_out", cut_);
  print(line.add("seconds", std::chrono::duration<double>(Clock::now() - began_).count()));
  return end == std::string("failed") ? 1 : 0;
}

int Report::finish() const {
  if (tried_ == 0) return close("failed", "nothing was tried");
  const std::string cut = cut_ == 0 ? "" : std::to_string(cut_) + " left out as time ran out";
  return close(failed_ == 0 ? "passed" : "failed", cut);
}

int Report::skip(const std::string& why) const { return close("skipped", why); }
int Report::break_down(const std::string& why) const { return close("failed", why); }

}  // namespace nvx::gpu
