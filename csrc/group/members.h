#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "group/meet/topology.h"
#include "group/plan/plan.h"
#include "kernel/cpu/channel.h"
#include "memory/shm/neighbours.h"

namespace nvx {

namespace net {
class GroupPort;
}

/// Who the ranks of a group are, as one of them has met them, and where their memory is. Set-up makes it (setup.h);
/// from then on it stays as it is.
///
/// A rank's local_rank is its index among the ranks of its host: what is shared inside the host is numbered by
/// local_rank.
struct Members {
  int rank = 0;            ///< whose view this is
  int64_t generation = 0;  ///< how often this rank has set the group up in its store, this time included
  uint64_t id = 0;         ///< what the ranks of this group, and no other group, are known by
  Topology topology;
  PlanFacts facts;
  std::shared_ptr<Neighbours> neighbours;
  Span pad_span;                                  ///< of this rank, in its process's arena
  std::vector<std::shared_ptr<Neighbour>> peers;  ///< by local_rank; null for ranks of this process
  std::vector<kernel::PeerMemory> memory;         ///< by local_rank

  /// What the ranks of this set-up, and of no other one, say to each other through the store.
  std::string key(const std::string& what) const;

  /// The ranks of this host, by local_rank.
  const std::vector<int>& here() const { return topology.hosts[size_t(topology.host_of[size_t(rank)])]; }
  int local_rank() const { return topology.local_rank_of[size_t(rank)]; }
  int local_ranks() const { return int(memory.size()); }
  /// -1 for a rank of another host.
  int local_rank_of(int other) const {
    return topology.host_of[size_t(other)] == topology.host_of[size_t(rank)] ? topology.local_rank_of[size_t(other)]
                                                                             : -1;
  }
  kernel::Pad pad(int local_rank) const { return {memory[size_t(local_rank)].pad, memory.size()}; }
  kernel::Pad own_pad() const { return pad(local_rank()); }
  std::string describe_local_rank(int local_rank) const { return topology.describe(here()[size_t(local_rank)]); }

  /// Whether the rank's process has ended; ...
  bool dead(int local_rank) const { return peers[size_t(local_rank)] && peers[size_t(local_rank)]->dead(); }
  /// ... or the rank has left the group.
  bool gone(int local_rank) const;
  /// Holds when no peer can touch any more what this rank exported for the group. May be asked when that is gone.
  std::function<bool()> everybody_gone() const;
};

/// What a rank's plans go by. Where hosts have different numbers of ranks, the plan inside a host follows its own:
/// nobody else has to agree.
PlanFacts facts_of(const Topology& topology, int rank);

/// Tells the ranks that this one has talked to, and one of each host, which tells the others of its host, why the group
/// has failed here. Best effort. Who only passes on what it was told need not tell all hosts again.
void tell_other_hosts(net::GroupPort& port, const Topology& topology, const Failure& failure);

}  // namespace nvx
