#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "group/plan/tuning.h"
#include "kernel/cpu/pad.h"
#include "kernel/cpu/run_on_cpu.h"
#include "schedule/catalog.h"

namespace nvx {

/// The facts on which a plan depends. `ranks` and `cores` are the same on every rank of a host, the others on every
/// rank.
struct PlanFacts {
  size_t ranks = 1;  ///< of this host
  size_t hosts = 1;
  size_t rails = 1;  ///< ranks of every host that can each carry a part of the data between hosts
  size_t world = 1;  ///< ranks of all hosts
  size_t cores = 1;  ///< that these ranks may use
  size_t l2_bytes = 1 << 20;
  size_t l3_bytes = 32 << 20;
  enum class Force { kNothing, kOneShot, kPipelined } force = Force::kNothing;
  Tuning tuning = {};

  size_t tuned(Tune key) const { return size_t(tuning.of(key, ranks)); }
};

struct Choice {
  kernel::Algorithm algorithm;
  size_t lease_bytes;  ///< staging of each rank whose data others read; 0: none
  const char* why;
};

/// The cache policy for data that only the writing rank reads. It bypasses the caches once the data that all ranks read
/// and write no longer fits the last-level cache: otherwise lines would be fetched only to be overwritten, and would
/// evict data that is needed next. `kernel/reduce/cache_policy.h` decides for data that other ranks read.
kernel::CachePolicy policy_to_keep(size_t bytes, const PlanFacts& facts);

size_t most_lease(const PlanFacts& facts);
/// The part of a group's lease through which consecutive operations rotate, so that a rank writes to lines that its
/// peers' caches no longer hold: a write to a line that another core has read lately takes several times as long as the
/// copy. 0: none, since ranks that share cores share their caches too.
size_t rotation(const PlanFacts& facts);
/// The bytes from which `policy_to_keep()` bypasses the caches.
size_t past_caches(const PlanFacts& facts);

/// Pure, and the same on every rank. `bytes`: the most that one rank puts into its slot, or stages in total.
Choice plan(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

/// The algorithms for a collective inside a host, in the order of message length, the shortest first.
std::vector<kernel::Algorithm> host_algorithms_of(kernel::Collective collective);

inline constexpr size_t kSlicesInFlight = 4;  ///< slices between hosts at a time

struct InterHostPlan {
  const schedule::Row* row;
  size_t slice;                      ///< bytes of the whole that one schedule carries
  bool by_leader;                    ///< one rank per host carries all; otherwise each rail carries its part
  kernel::Collective before, after;  ///< collectives inside each host; kNone: nothing
  const char* why;
};

/// Pure, like `plan()`. `bytes`: the whole message for reductions and broadcast; the largest block for gathers and
/// exchanges. The same on every host, even if hosts have different numbers of ranks.
enum class Blocks { kAlike, kOfAnySize };
InterHostPlan plan_between(schedule::Collective collective, size_t bytes, const PlanFacts& facts,
                           Blocks blocks = Blocks::kAlike);

/// The corresponding collective between hosts; barrier if there is none.
schedule::Collective across(kernel::Collective collective);

/// For `bytes` as in `plan_between()`: those cut into slices, and those that steps inside the host put into a slot.
struct Sizes {
  size_t sliced, before, after;
};
Sizes sizes(schedule::Collective collective, size_t bytes, const InterHostPlan& inter_host, const PlanFacts& facts);

/// Whether the ranks of a host distribute the blocks of all hosts in one step, in a copy, rather than a host at a time.
inline bool packs_all_gather(size_t block, const PlanFacts& facts) {
  return block * facts.hosts <= facts.tuned(Tune::kAllGatherPacked);
}

/// The largest size for one-shot, in bytes.
size_t one_shot_limit(kernel::Collective collective, const PlanFacts& facts);

/// The plan in words, for a rank of the host with the most ranks.
std::string explain(kernel::Collective collective, size_t bytes, const PlanFacts& facts);

}  // namespace nvx
