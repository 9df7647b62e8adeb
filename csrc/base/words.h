#pragma once

#include <functional>
#include <string>

namespace nvx {

/// What another process wrote, as one line of text that every terminal and every decoder takes: what is no UTF-8, and
/// what controls terminals, is replaced.
std::string printable(std::string text);

inline std::string of_rank(int rank) { return "rank " + std::to_string(rank); }

/// What messages call a rank: some of a group's number themselves anew among each other.
using RankNames = std::function<std::string(int rank)>;

}  // namespace nvx
