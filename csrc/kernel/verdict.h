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
};

}  // namespace nvx::kernel
