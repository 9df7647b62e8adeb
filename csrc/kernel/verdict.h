#pragma once

#include <cstdint>

#include "base/flag.h"

namespace nvx::kernel {

/// Why an algorithm returned false.
struct Verdict {
  enum class Cause { kNone, kWait, kMismatch, kBadLease, kCounts };
  Cause cause = Cause::kNone;
  Waited how = Waited::kReached;
  int peer = -1;
  Stamp wanted = 0;
  Stamp seen = 0;
  uint64_t mine = 0;    ///< kCounts: bytes expected here ...
  uint64_t theirs = 0;  ///< ... and offered there

  /// A wait ended without the stamp that it was for.
  static constexpr Verdict wait(Waited how, int peer, Stamp wanted, Stamp seen) {
    return {Cause::kWait, how, peer, wanted, seen, 0, 0};
  }
  /// The peer has called something else.
  static constexpr Verdict mismatch(int peer, Stamp wanted, Stamp seen) {
    return {Cause::kMismatch, Waited::kReached, peer, wanted, seen, 0, 0};
  }
  /// What the rank says of its staging cannot be, or is too small for the operation.
  static constexpr Verdict bad_lease(int rank) { return {Cause::kBadLease, Waited::kReached, rank, 0, 0, 0, 0}; }
  /// The peer offers other bytes than are expected here.
  static constexpr Verdict counts(int peer, uint64_t mine, uint64_t theirs) {
    return {Cause::kCounts, Waited::kReached, peer, 0, 0, mine, theirs};
  }
};

}  // namespace nvx::kernel
