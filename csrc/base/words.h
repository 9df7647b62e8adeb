#pragma once

#include <functional>
#include <string>

#include "base/deadline.h"

namespace nvx {

/// What another process wrote, as one line of text that every terminal and every decoder takes: bytes that are not
/// UTF-8, and characters that control terminals, are replaced.
std::string printable(std::string text);

/// "1.50 s"
std::string seconds(double span);
/// The time since an operation began.
std::string seconds(const Deadline& deadline);

/// The advice where the cause lies with another rank; rank: "rank 3".
inline std::string see_log_of(const std::string& rank) { return "see the log of " + rank; }

inline std::string of_rank(int rank) { return "rank " + std::to_string(rank); }

/// What messages call a rank. Where some ranks of a group are numbered anew among each other, messages still use the
/// group's numbers.
using RankNames = std::function<std::string(int rank)>;

}  // namespace nvx
