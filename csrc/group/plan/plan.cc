#include "group/plan/plan.h"

#include <algorithm>
#include <bit>

#include "base/round_up.h"
#include "kernel/cpu/host_collectives.h"
#include "memory/shm/leases.h"

namespace nvx {
namespace {

using kernel::Algorithm;
using kernel::Collective;

constexpr size_t kSlot = kernel::kSlotBytes;

/// One row per collective: its algorithm for messages up to the limit, and for larger ones.
struct Row {
  Collective collective;
  Algorithm small, large;
  Tune limit = {};  ///< where `small` and `large` differ
};

constexpr Row kTable[] = {
    {Collective::kAllReduce, Algorithm::kReduceOneShot, Algorithm::kReducePipelined, Tune::kAllReduceOneShot},
    {Collective::kReduce, Algorithm::kReduceOneShot, Algorithm::kReducePipelined, Tune::kReduceOneShot},
    {Collective::kReduceScatter, Algorithm::kReduceScatterOneShot, Algorithm::kReduceScatterPipelined,
     Tune::kReduceScatterOneShot},
    {Collective::kAllGather, Algorithm::kPublishOneShot, Algorithm::kPublishPipelined, Tune::kAllGatherOneShot},
    {Collective::kBroadcast, Algorithm::kPublishOneShot, Algorithm::kPublishPipelined, Tune::kBroadcastOneShot},
    {Collective::kAllToAll, Algorithm::kExchange, Algorithm::kExchange},
    {Collective::kGather, Algorithm::kExchange, Algorithm::kExchange},
    {Collective::kScatter, Algorithm::kExchange, Algorithm::kExchange},
    {Collective::kBarrier, Algorithm::kBarrier, Algorithm::kBarrier},
};

const Row& row(Collective collective) {
  for (const Row& r : kTable) {
    if (r.collective == collective) return r;
  }
  return kTable[std::size(kTable) - 1];
}

size_t lease_for(size_t bytes, const PlanFacts& facts) {
  const size_t padded = bytes + 64 * facts.ranks;  // every part begins on a cache line
  return std::clamp(std::bit_ceil(padded), LeasePool::kSmallest, most_lease(facts));
}

}  // namespace

/// A chunk should pass between cores in the second-level cache; all ranks' staging should fit the last-level cache.
size_t most_lease(const PlanFacts& facts) {
  if (const size_t own = facts.tuned(Tune::kLease)) return own;
  const size_t share = facts.l3_bytes * 3 / 4 / std::max<size_t>(facts.ranks, 1);
  return std::clamp<size_t>(std::min(share, kernel::kDepth * facts.l2_bytes), 1 << 20, 12 << 20);
}

size_t rotation(const PlanFacts& facts) {
  if (facts.ranks > facts.cores) return 0;
  return std::min(2 * facts.l2_bytes, facts.l3_bytes / 2 / facts.ranks);
}

std::vector<Algorithm> host_algorithms_of(Collective collective) {
  const Row& r = row(collective);
  if (r.small == r.large) return {r.small};
  return {r.small, r.large};
}

size_t one_shot_limit(Collective collective, const PlanFacts& facts) {
  const Row& r = row(collective);
  if (r.small == r.large) return kSlot;
  if (facts.force == PlanFacts::Force::kOneShot) return kSlot;
  if (facts.force == PlanFacts::Force::kPipelined) return 0;
  return facts.tuned(r.limit);
}

size_t past_caches(const PlanFacts& facts) {
  if (facts.tuning.set_by(Tune::kPastCaches) != SetBy::kDefault) return facts.tuned(Tune::kPastCaches);
  return facts.l3_bytes / 2 / std::max<size_t>(facts.ranks, 1);
}

kernel::CachePolicy policy_to_keep(size_t bytes, const PlanFacts& facts) {
  return bytes >= past_caches(facts) ? kernel::CachePolicy::kPast : kernel::CachePolicy::kCached;
}

Choice plan(Collective collective, size_t bytes, const PlanFacts& facts) {
  const Row& r = row(collective);
  if (bytes <= one_shot_limit(collective, facts) || bytes == 0) return {r.small, 0, "up to the limit of one-shot"};
  return {r.large, lease_for(bytes, facts), "the message is too large for one-shot: chunks through staging memory"};
}

namespace {

using Across = schedule::Collective;

struct Limit {
  constexpr Limit(Tune tuned, size_t factor = 1) : key(tuned), is_tuned(true), times(factor) {}
  constexpr Limit(size_t number) : fixed(number) {}
  bool allows(size_t n, const PlanFacts& facts) const {
    return is_tuned ? ceil_div(n, times) <= facts.tuned(key) : n <= fixed;
  }

  Tune key = {};
  bool is_tuned = false;
  size_t times = 1;
  size_t fixed = 0;
};
constexpr size_t kAny = SIZE_MAX;

/// Whether one rank per host carries all data between hosts, or all rails carry one part each.
enum class By { kLeader, kRails };

/// When a schedule is chosen besides its limits.
enum class If {
  kAlways,
  kAlike,           ///< all blocks have the same size
  kDirectIsFaster,  ///< between two hosts, or for few bytes: in a longer exchange all send to one host at once
  kRingIsFaster,
  kChainIsFaster,
  kTreeIsFaster
};
constexpr size_t kMostDirect = 512 << 10;  ///< of all ranks together

/// The bytes that a link moves in the time of a message's latency: between 6 KiB (1 Gb/s, 50 us) and 240 KiB (100 Gb/s,
/// 20 us).
constexpr size_t kMessage = 24 << 10;

/// Halving moves the whole once more if it has to fold hosts in, but takes fewer messages in sequence. Without folds it
/// moves the same bytes as a ring, though over longer ways and with pauses: then the ring's additional messages may
/// take a quarter of the time. `at_once`: the bytes that go round together.
bool ring_is_faster(size_t at_once, const PlanFacts& facts) {
  const size_t more = facts.hosts - std::min<size_t>(facts.hosts, std::bit_width(facts.hosts) + 1);
  return at_once >= more * kMessage * (std::has_single_bit(facts.hosts) ? 4 : 1);
}

/// A chain takes the time of `bytes` and of hosts - 2 slices; a scatter and an all-gather take that of 2 (hosts - 1) /
/// hosts times `bytes`. So the chain is faster from `hosts` slices on.
bool chain_is_faster(size_t bytes, const PlanFacts& facts) {
  return facts.hosts <= 2 || bytes / facts.tuned(Tune::kSlice) >= facts.hosts;
}

/// A binomial tree moves the whole in each of its rounds, a scatter and an all-gather about twice in all, but in a
/// message for each host.
bool tree_is_faster(size_t bytes, const PlanFacts& facts) {
  const size_t others = facts.hosts - 1, rounds = std::bit_width(others);
  return rounds * facts.hosts <= 2 * others ||
         bytes / kMessage < facts.hosts * others / (rounds * facts.hosts - 2 * others);
}

/// The first matching row decides.
struct InterHostRow {
  Across collective;
  Limit most_bytes;
  Limit most_hosts;
  const char* schedule;
  By by;
  const char* why;
  If condition = If::kAlways;
  bool cuts = false;  ///< whether it cuts a slice into a part for each host
};
constexpr bool kCuts = true;

constexpr const char kFewHosts[] = "large, few hosts: every byte is reduced once";
constexpr const char kRingWhy[] = "large: the fewest bytes, one neighbour";
constexpr const char kChainWhy[] = "large: slices follow each other along the hosts";
constexpr const char kFewStepsWhy[] = "short for its number of hosts: the fewest steps";

constexpr Limit kPairBytes{Tune::kAllReduceFewestSteps, 16};

constexpr InterHostRow kInterHostPlans[] = {
    {Across::kAllReduce, Tune::kAllReduceFewestSteps, size_t(2), "pair", By::kLeader, "small, two hosts: one exchange"},
    {Across::kAllReduce, Tune::kAllReduceFewestSteps, kAny, "recursive_doubling", By::kLeader,
     "small: the fewest steps"},
    {Across::kAllReduce, kPairBytes, size_t(2), "pair", By::kRails, "two hosts: one exchange"},
    {Across::kAllReduce, kAny, Tune::kAllReduceRingHosts, "ring", By::kRails, kFewHosts, If::kAlways, kCuts},
    {Across::kAllReduce, kAny, kAny, "ring", By::kRails, kRingWhy, If::kRingIsFaster, kCuts},
    {Across::kAllReduce, kAny, kAny, "halving_doubling", By::kRails, kFewStepsWhy, If::kAlways, kCuts},
    {Across::kReduceScatter, Tune::kReduceScatterFewestSteps, kAny, "halving", By::kRails, "small: the fewest steps"},
    {Across::kReduceScatter, kAny, Tune::kReduceScatterRingHosts, "ring", By::kRails, kFewHosts},
    {Across::kReduceScatter, kAny, kAny, "ring", By::kRails, kRingWhy, If::kRingIsFaster},
    {Across::kReduceScatter, kAny, kAny, "halving", By::kRails, kFewStepsWhy},
    {Across::kAllGather, kAny, Tune::kAllGatherDirectHosts, "direct", By::kRails,
     "few hosts or few bytes: every block goes directly to its destination", If::kDirectIsFaster},
    {Across::kAllGather, Tune::kAllGatherFewestSteps, kAny, "bruck", By::kRails, "small: the fewest steps", If::kAlike},
    {Across::kAllGather, kAny, kAny, "ring", By::kRails, kRingWhy},
    {Across::kBroadcast, Tune::kBroadcastFewestSteps, kAny, "binomial", By::kLeader, "small: the fewest steps"},
    {Across::kBroadcast, kAny, kAny, "chain", By::kLeader, kChainWhy, If::kChainIsFaster},
    {Across::kBroadcast, kAny, kAny, "binomial", By::kLeader, kFewStepsWhy, If::kTreeIsFaster},
    {Across::kBroadcast, kAny, kAny, "scatter_all_gather", By::kLeader, "too short for a chain: in parts"},
    {Across::kReduce, Tune::kReduceFewestSteps, kAny, "binomial", By::kLeader, "small: the fewest steps"},
    {Across::kReduce, kAny, kAny, "chain", By::kLeader, kChainWhy, If::kChainIsFaster},
    {Across::kReduce, kAny, kAny, "ring_gather", By::kLeader, "too short for a chain: in parts", If::kRingIsFaster,
     kCuts},
    {Across::kReduce, kAny, kAny, "halving_gather", By::kLeader, kFewStepsWhy, If::kAlways, kCuts},
    {Across::kGather, kAny, kAny, "linear", By::kRails, "every block goes directly to its destination"},
    {Across::kScatter, kAny, kAny, "linear", By::kRails, "every block goes directly to its destination"},
    {Across::kAllToAll, kAny, kAny, "pairwise", By::kRails, "every block goes directly to its destination"},
    {Across::kBarrier, kAny, kAny, "dissemination", By::kLeader, "the fewest steps"},
};

/// The collectives that a host's ranks run among themselves before and after the schedule between hosts.
struct InsideRow {
  Across collective;
  By by;
  Collective before, after;
};

constexpr InsideRow kInside[] = {
    {Across::kAllReduce, By::kLeader, Collective::kReduce, Collective::kBroadcast},
    {Across::kAllReduce, By::kRails, Collective::kReduceScatter, Collective::kAllGather},
    {Across::kReduceScatter, By::kRails, Collective::kReduceScatter, Collective::kNone},
    {Across::kAllGather, By::kRails, Collective::kNone, Collective::kAllGather},
    {Across::kBroadcast, By::kLeader, Collective::kNone, Collective::kBroadcast},
    {Across::kReduce, By::kLeader, Collective::kReduce, Collective::kNone},
    {Across::kGather, By::kRails, Collective::kNone, Collective::kGather},
    {Across::kScatter, By::kRails, Collective::kNone, Collective::kScatter},
    {Across::kAllToAll, By::kRails, Collective::kNone, Collective::kAllToAll},
    {Across::kBarrier, By::kLeader, Collective::kBarrier, Collective::kBarrier},
};

const InsideRow& inside(Across collective, By by) {
  return *std::ranges::find_if(kInside, [&](const InsideRow& r) { return r.collective == collective && r.by == by; });
}

}  // namespace

InterHostPlan plan_between(Across collective, size_t bytes, const PlanFacts& facts, Blocks blocks) {
  for (const InterHostRow& r : kInterHostPlans) {
    if (r.collective != collective || !r.most_bytes.allows(bytes, facts)) continue;
    if (!r.most_hosts.allows(facts.hosts, facts)) continue;
    if (r.condition == If::kAlike && blocks != Blocks::kAlike) continue;
    const size_t parts = r.cuts ? std::clamp<size_t>(facts.hosts, 1, 8) : 1;
    const size_t rails = collective == Across::kAllReduce && r.by == By::kRails ? std::max<size_t>(facts.rails, 1) : 1;
    const size_t slice = facts.tuned(Tune::kSlice) * parts * rails;
    // Few slices go round at once, so a longer message does not make up for the messages of each.
    const size_t at_once = r.cuts ? std::min(bytes, slice * kSlicesInFlight / 2) : bytes;
    if (r.condition == If::kDirectIsFaster && facts.hosts > 2 && bytes > kMostDirect / facts.world) continue;
    if (r.condition == If::kRingIsFaster && !ring_is_faster(at_once, facts)) continue;
    if (r.condition == If::kTreeIsFaster && !tree_is_faster(bytes, facts)) continue;
    if (r.condition == If::kChainIsFaster && !chain_is_faster(bytes, facts)) continue;
    const InsideRow& in = inside(collective, r.by);
    return {schedule::find(collective, r.schedule), slice, r.by == By::kLeader, in.before, in.after, r.why};
  }
  return {nullptr, 0, false, Collective::kNone, Collective::kNone, ""};
}

Across across(Collective collective) { return collective == Collective::kNone ? Across::kBarrier : collective; }

/// Must match the slices and staged bytes of `group/hierarchy/slices.h`; a test compares them.
Sizes sizes(Across collective, size_t bytes, const InterHostPlan& inter_host, const PlanFacts& facts) {
  const size_t slice = std::min(bytes, inter_host.slice);
  switch (collective) {
    case Across::kAllReduce: {
      if (inter_host.by_leader) return {bytes, bytes, bytes};
      const size_t part = ceil_div(slice, facts.rails);
      return {bytes, part * facts.ranks, part};
    }
    case Across::kReduceScatter: {
      const size_t block = ceil_div(bytes, facts.world);
      return {block, std::min(block, inter_host.slice) * facts.ranks, 0};
    }
    case Across::kAllGather:
    case Across::kBroadcast:
    case Across::kReduce: return {bytes, slice, slice};
    default: return {0, bytes, bytes};
  }
}

namespace {

std::string ranks_of(size_t n) { return std::to_string(n) + (n == 1 ? " rank" : " ranks"); }

std::string call_words(Collective collective, size_t bytes) {
  const std::string size = collective == Collective::kBarrier ? "" : std::to_string(bytes) + " bytes a rank, ";
  return std::string(name(collective)) + " of " + size;
}

std::string explain_between(Collective collective, size_t bytes, const PlanFacts& facts) {
  const Across what = across(collective);
  const InterHostPlan inter_host = plan_between(what, bytes, facts);
  const Sizes size = sizes(what, bytes, inter_host, facts);
  const bool even = facts.world == facts.ranks * facts.hosts;
  const auto step = [&](Collective inside, size_t staged) {
    const bool none = inside == Collective::kNone || facts.ranks == 1;
    return none ? "" : std::string("inside a host ") + kernel::name(plan(inside, staged, facts).algorithm);
  };
  const std::string first = step(inter_host.before, size.before), last = step(inter_host.after, size.after);
  std::string text = call_words(collective, bytes) + ranks_of(facts.world) + " on " + std::to_string(facts.hosts) +
                     " hosts, " + std::to_string(facts.ranks) + (even ? " on each: " : " on the largest: ") + first +
                     (first.empty() ? "" : ", ") + "between hosts " + inter_host.row->name + " (" + inter_host.why +
                     ")";
  if (inter_host.by_leader && facts.ranks > 1) text += " by one rank of each host";
  if (!inter_host.by_leader && size.sliced)
    text += " on " + std::to_string(facts.rails) + (facts.rails == 1 ? " rail" : " rails (ranks of each host)");
  if (size.sliced > inter_host.slice) {
    text += ", in " + std::to_string(ceil_div(size.sliced, inter_host.slice)) + " slices of " +
            std::to_string(inter_host.slice >> 10) + " KiB that overlap with the steps inside";
  }
  return text + (last.empty() ? "" : ", " + last);
}

std::string explain_inside(Collective collective, size_t bytes, const PlanFacts& facts) {
  const Choice choice = plan(collective, bytes, facts);
  std::string text = call_words(collective, bytes) + ranks_of(facts.ranks) +
                     " on one host: " + kernel::name(choice.algorithm) + " (" + choice.why + "; one-shot up to " +
                     std::to_string(one_shot_limit(collective, facts)) + " bytes";
  if (host_algorithms_of(collective).size() > 1) {
    text += bytes > kSlot ? ", at most " + std::to_string(kSlot) + " with" : std::string(", override with");
    text += " NVX_ALGO or NVX_TUNE";
  }
  if (choice.lease_bytes) {
    text += "; staging " + std::to_string(choice.lease_bytes >> 10) + " KiB a rank, at most the lease of NVX_TUNE";
  }
  if (policy_to_keep(bytes, facts) == kernel::CachePolicy::kPast) text += "; results are written past the caches";
  return text + ")";
}

}  // namespace

std::string explain(Collective collective, size_t bytes, const PlanFacts& facts) {
  const size_t ranks = facts.hosts > 1 ? facts.world : facts.ranks;
  const std::string all = call_words(collective, bytes) + ranks_of(ranks) +
                          (facts.hosts > 1 ? " on " + std::to_string(facts.hosts) + " hosts: " : " on one host: ");
  if (ranks == 1) return all + "no other rank, so nothing is chosen";
  if (collective != Collective::kBarrier && bytes == 0)
    return all + "no data to move, so nothing is chosen; the ranks only compare their calls";
  if (collective == Collective::kBarrier && facts.hosts == 1) return all + "flags in shared memory, nothing to choose";
  return facts.hosts > 1 ? explain_between(collective, bytes, facts) : explain_inside(collective, bytes, facts);
}

}  // namespace nvx
