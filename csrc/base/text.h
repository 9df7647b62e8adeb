#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace nvx {

/// Makes a peer's text safe to print: one line of valid UTF-8. Invalid bytes become '?', control characters blanks.
std::string printable(std::string text);

std::string trimmed(const std::string& text);
/// The items of a list with commas, without the blanks around them.
std::vector<std::string> items(const std::string& list);
/// "eth0, eth1"
std::string joined(const std::vector<std::string>& names, const std::string& between = ", ");

/// The name that differs least from the text, if by at most two letters: the likely intention of a typo.
std::optional<std::string> nearest(const std::string& text, const std::vector<std::string>& names);

/// The bytes that "4096", "4K", "64M" or "1G" means.
std::optional<uint64_t> size_of_text(const std::string& text);

/// Writes the text to a field of a fixed layout: cut to its size, and zeros behind it.
template <size_t N>
void put(char (&field)[N], const std::string& text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), n);
  std::memset(field + n, 0, N - n);
}

/// The first `most` bytes of a file; nothing, and errno, if it cannot be read. errno is 0 for a folder, a FIFO or a
/// device: reading it might never end.
std::optional<std::string> content_of(const std::string& path, size_t most);

/// "1.50 s"
std::string seconds(double span);
std::string seconds(const Deadline& deadline);
/// The length of a deadline: "2000 ms".
std::string how_long(const Deadline& deadline);

/// The advice where the cause lies with another rank; rank: "rank 3".
inline std::string see_log_of(const std::string& rank) { return "see the log of " + rank; }

/// The advice after a wait for that many ranks (0: not known); settings: those of its timeout.
std::string see_logs_of(size_t ranks, const std::string& settings);

inline std::string of_rank(int rank) { return "rank " + std::to_string(rank); }

/// Maps a rank to its name in messages, which use the group's numbers also where a subset is numbered anew.
using RankNames = std::function<std::string(int rank)>;

}  // namespace nvx
