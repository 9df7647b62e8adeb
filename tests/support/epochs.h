#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/ranks.h"

namespace nvx::test {

/// The epochs at which tests start: 0, and shortly before the sign changes or the number wraps.
inline std::vector<uint32_t> first_epochs() {
  if (why_no_processes() || is_sanitized()) return {uint32_t(-7)};  // slow there, so only the most revealing one
  return {0, (1u << 31) - 7, uint32_t(-7)};
}
/// "3_from_2_31", for a test with so many ranks.
inline std::string name_of(int ranks, uint32_t first_epoch) {
  return std::to_string(ranks) + "_from_" + (first_epoch == 0 ? "0" : first_epoch < (1u << 31) ? "2_31" : "2_32");
}

}  // namespace nvx::test
