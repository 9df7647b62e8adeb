#include "base/text.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>

#include "base/handle.h"

namespace nvx {
namespace {

/// The length of the UTF-8 character at `at`, or 0 if it is invalid: truncated, overlong, a surrogate or out of range.
size_t character_at(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  uint32_t code = first & (0xffu >> (bytes + 1));
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool half = code >= 0xd800 && code < 0xe000;
  return first >= 0xc0 && first < 0xf8 && code >= kLeast[bytes] && code <= 0x10ffff && !half ? bytes : 0;
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t swap = corner + (a[i - 1] != b[j - 1]);
      corner = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, swap});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string trimmed(const std::string& text) {
  constexpr char kSpace[] = " \t\r\n\v\f";
  const size_t first = text.find_first_not_of(kSpace);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(kSpace) + 1 - first);
}

std::vector<std::string> items(const std::string& list) {
  std::vector<std::string> all;
  std::istringstream stream(list);
  for (std::string one; std::getline(stream >> std::ws, one, ',');) all.push_back(trimmed(one));
  return all;
}

std::string joined(const std::vector<std::string>& names, const std::string& between) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : between) + name;
  return text;
}

std::optional<std::string> nearest(const std::string& text, const std::vector<std::string>& names) {
  constexpr size_t kTypo = 2;  // edits
  const auto closest = std::ranges::min_element(names, {}, [&](const auto& name) { return edit_distance(text, name); });
  if (closest == names.end() || edit_distance(text, *closest) > kTypo) return std::nullopt;
  return *closest;
}

std::optional<uint64_t> size_of_text(const std::string& text) {
  constexpr char kUnits[] = "KMG";
  if (text.empty() || !std::isdigit(uint8_t(text[0]))) return std::nullopt;
  char* end = nullptr;
  errno = 0;
  const uint64_t value = std::strtoull(text.c_str(), &end, 10);
  if (errno == ERANGE) return std::nullopt;
  if (*end == '\0') return value;
  const char* unit = std::strchr(kUnits, std::toupper(uint8_t(*end)));
  if (!unit || end[1] != '\0') return std::nullopt;
  const auto bits = 10 * (unit - kUnits + 1);
  if (value > UINT64_MAX >> bits) return std::nullopt;
  return value << bits;
}

std::string seconds(double span) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", span);
  return text;
}

std::optional<std::string> content_of(const std::string& path, size_t most) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat what {};
  if (!fd || fstat(fd.get(), &what) != 0) return std::nullopt;
  errno = 0;
  if (!S_ISREG(what.st_mode)) return std::nullopt;
  std::string content(most, '\0');
  size_t used = 0;
  for (ssize_t got = 1; got != 0 && used < most;) {
    got = ::read(fd.get(), content.data() + used, most - used);
    if (got < 0 && errno != EINTR) return std::nullopt;
    if (got > 0) used += size_t(got);
  }
  content.resize(used);
  return content;
}

std::string seconds(const Deadline& deadline) { return seconds(deadline.elapsed_s()); }

std::string how_long(const Deadline& deadline) {
  const auto span = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - deadline.start);
  return std::to_string(span.count()) + " ms";
}

std::string printable(std::string text) {
  for (size_t at = 0; at < text.size();) {
    const unsigned char c = static_cast<unsigned char>(text[at]);
    const bool controls = c == 0xc2 && at + 1 < text.size() && static_cast<unsigned char>(text[at + 1]) < 0xa0;
    const size_t bytes = character_at(text, at);
    if (c < 0x20 || c == 0x7f) text[at] = ' ';
    if (bytes == 0) text[at] = '?';
    if (bytes == 2 && controls) text[at] = text[at + 1] = ' ';
    at += bytes == 0 ? 1 : bytes;
  }
  return text;
}

std::string see_logs_of(size_t ranks, const std::string& settings) {
  const char* const logs = ranks == 1 ? "see the log of that rank; if it is only slow, raise the timeout ("
                                      : "see the logs of these ranks; if they are only slow, raise the timeout (";
  return logs + settings + ")";
}

}  // namespace nvx
