#pragma once

#include <cstddef>
#include <string>

#include "kernel/launch.h"
#include "kernel/pad.h"

namespace nvx {

/// What a plan may depend on: the same on every rank.
struct PlanFacts {
  size_t ranks = 1;
  size_t cores = 1;
  size_t l2_bytes = 1 << 20;
  size_t l3_bytes = 32 << 20;
  enum class Force { kNothing, kOneShot, kPipelined } force = Force::kNothing;
  size_t one_shot_bytes = 0;  ///< the user's limit; 0: the table's
  size_t lease_bytes = 0;     ///< the user's staging; 0: sized here
};

struct Choice {
  kernel::Algorithm algorithm;
  size_t lease_bytes;  ///< staging that this rank leases; 0: none
  const char* why;
};

/// Pure: the same question gets the same answer on every rank. bytes: the most that one rank puts into its slot, and
/// would stage in all.
Choice plan(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

/// Where one-shot ends, in bytes.
size_t one_shot_limit(kernel::Collective collective, const PlanFacts& facts);

const char* name(kernel::Collective collective);

/// The plan of one question, in words.
std::string explain(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

}  // namespace nvx
