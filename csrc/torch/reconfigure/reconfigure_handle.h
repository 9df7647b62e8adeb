#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memory/shm/arena.h"

namespace nvx {

/// What a rank of a reconfigurable group tells the others of itself. They get it as one word of text, by ways of their
/// own, before they can meet. It is good until the rank is reconfigured: so a list that some have kept too long fits
/// nobody.
struct MemberHandle {
  int rank = 0;                 ///< in the group that stands, or as the rank was started
  std::optional<int64_t> uuid;  ///< of the group that stands; none before the first
  int64_t pid = 0;
  ArenaId process;     ///< how processes of one host know each other
  uint64_t group = 0;  ///< which of this process's groups that is
  std::string host;

  std::string text() const;
  /// "pid 7 on host h"
  std::string who() const { return "pid " + std::to_string(pid) + " on host " + host; }
  /// Throws ArgumentError: another backend's handle, for instance.
  static MemberHandle parse(const std::string& text);
};

/// How the handles give ranks: by their positions; or by themselves, where they came as a set. Then those that were in
/// a group before come first, in the order of their ranks there, so that rank 0 is none that has just been started.
enum class RankBy { kPosition, kHandle };

/// The members in the order of their new ranks, the same on all that are given the same handles. Throws ArgumentError.
std::vector<MemberHandle> members_of(const std::vector<std::string>& handles, RankBy by);

/// What tells one list of members from another.
uint64_t digest_of(const std::vector<MemberHandle>& members);

}  // namespace nvx
