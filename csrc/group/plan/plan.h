#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernel/cpu/launch.h"
#include "kernel/cpu/pad.h"
#include "schedule/catalog.h"

namespace nvx {

/// What a plan may depend on: the same on every rank.
struct PlanFacts {
  size_t ranks = 1;  ///< of this host
  size_t hosts = 1;
  size_t rails = 1;  ///< ranks of every host that can carry what goes between hosts
  size_t world = 1;  ///< ranks of all hosts
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

/// How a rank writes what only it will read. Past the caches once what all ranks read and write here no longer fits the
/// last-level cache: lines would be fetched only to be overwritten, and would evict data that is needed next. What
/// others will read is not so simple (kernel/reduce/cache_policy.h).
kernel::CachePolicy policy_to_keep(size_t bytes, const PlanFacts& facts);

/// Pure: the same question gets the same answer on every rank. bytes: the most that one rank puts into its slot, and
/// would stage in all.
Choice plan(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

/// Those that a collective may go by inside a host, the one for the shortest messages first.
std::vector<kernel::Algorithm> host_algorithms_of(kernel::Collective collective);

inline constexpr size_t kSlicesInFlight = 4;  ///< of what goes between hosts

/// How a collective goes between hosts.
struct InterHostPlan {
  const schedule::Row* row;
  size_t slice;                      ///< bytes of the whole that go as one schedule
  bool by_leader;                    ///< one rank of each host does it alone; else each rail does its part
  kernel::Collective before, after;  ///< what each host's ranks do among themselves; kNone: nothing
  const char* why;
};

/// Pure, as plan(). bytes: of the whole for what is reduced or broadcast; of the largest block for what is gathered or
/// exchanged. The same on every host, also where these differ in their numbers of ranks.
enum class Blocks { kAlike, kOfAnySize };
InterHostPlan plan_between(schedule::Collective collective, size_t bytes, const PlanFacts& facts,
                           Blocks blocks = Blocks::kAlike);

/// The same collective between hosts; barrier's for what has none.
schedule::Collective across(kernel::Collective collective);

/// Of bytes as plan_between() counts them: what is cut into slices, and what a step inside the host then puts into one
/// rank's slot.
struct Sizes {
  size_t sliced, before, after;
};
Sizes sizes(schedule::Collective collective, size_t bytes, const InterHostPlan& inter_host, const PlanFacts& facts);

/// Where one-shot ends, in bytes.
size_t one_shot_limit(kernel::Collective collective, const PlanFacts& facts);

const char* name(kernel::Collective collective);

/// The plan of one question, in words: of a rank of the fullest host, where these differ.
std::string explain(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

}  // namespace nvx
