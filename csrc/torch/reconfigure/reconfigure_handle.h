#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/shm/arena.h"

namespace nvx {

/// The information that a rank of a reconfigurable group gives the others. The application carries it, as one word of
/// text, before the ranks can connect. It is valid until the rank is reconfigured, so an outdated list matches no
/// group.
struct MemberHandle {
  int rank = 0;                 ///< in the current group, or as the rank was started
  std::optional<int64_t> uuid;  ///< of the current group; none before the first
  int64_t pid = 0;
  ArenaId process;     ///< identifies processes of one host to each other
  uint64_t group = 0;  ///< number of the group within its process
  std::string host;

  std::string text() const;
  /// "pid 7 on host h"
  std::string description() const { return "pid " + std::to_string(pid) + " on host " + host; }
  /// Throws ArgumentError, for example for another backend's handle.
  static MemberHandle parse(const std::string& text);
};

/// How handles determine ranks: by their positions; or, for a set, by their contents. Then members of an earlier group
/// come first, in the order of their ranks there, so that rank 0 is no newly started process.
enum class RankBy { kPosition, kHandle };

/// The members in the order of their new ranks, alike for the same handles. Throws ArgumentError.
std::vector<MemberHandle> members_of(const std::vector<std::string>& handles, RankBy by);

/// Distinguishes lists of members.
uint64_t digest_of(const std::vector<MemberHandle>& members);

}  // namespace nvx
