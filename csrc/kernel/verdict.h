#pragma once

#include <cstdint>

#include "base/flag.h"

namespace nvx::kernel {

struct Verdict {
  enum class Cause { kNone, kWait, kMismatch, kBadLease, kCounts };
  Cause cause = Cause::kNone;
  Waited how = Waited::kReached;
  int peer = -1;
  Stamp wanted = 0;
  Stamp seen = 0;
  uint64_t mine = 0;    ///< kCounts: the bytes expected here ...
  uint64_t theirs = 0;  ///< ... and the bytes the peer offers

  /// A wait ended without the stamp.
  static constexpr Verdict wait(Waited how, int peer, Stamp wanted, Stamp seen) {
    return {Cause::kWait, how, peer, wanted, seen, 0, 0};
  }
  /// The peer called another operation.
  static constexpr Verdict mismatch(int peer, Stamp wanted, Stamp seen) {
    return {Cause::kMismatch, Waited::kReached, peer, wanted, seen, 0, 0};
  }
  /// The lease that the rank announced is invalid, or too small for the operation.
  static constexpr Verdict bad_lease(int rank) { return {Cause::kBadLease, Waited::kReached, rank, 0, 0, 0, 0}; }
  /// The peer offers another number of bytes than this rank expects.
  static constexpr Verdict counts(int peer, uint64_t mine, uint64_t theirs) {
    return {Cause::kCounts, Waited::kReached, peer, 0, 0, mine, theirs};
  }
};

}  // namespace nvx::kernel
