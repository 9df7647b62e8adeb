#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "group/plan/plan.h"
#include "group/setup/topology.h"
#include "kernel/cpu/channel.h"
#include "memory/shm/shm_registry.h"

namespace nvx {

namespace net {
class GroupPort;
}

/// The ranks of a group and their memory, from the view of one rank. Set-up creates it (`setup.h`); it is constant
/// afterwards.
///
/// A rank's `local_rank` is its index among the ranks of its host.
struct Members {
  std::string name;          ///< of the group
  int rank = 0;              ///< this rank
  uint32_t first_epoch = 0;  ///< the first value of the counters
  int64_t generation = 0;    ///< the number of set-ups of this group by this rank in its store, including this one
  uint64_t id = 0;           ///< identifies the ranks of this group; unique to it
  Topology topology;
  PlanFacts facts;
  Kernels kernels = Kernels::kIfFast;
  std::string tune;  ///< the option of the group; groups that split off inherit it
  std::shared_ptr<ShmRegistry> shm;
  Span pad_span;                                    ///< of this rank, in its process's arena
  std::vector<std::shared_ptr<PeerProcess>> peers;  ///< by `local_rank`; null for ranks of this process
  std::vector<kernel::PeerMemory> memory;           ///< by `local_rank`

  /// A key in the store that only the ranks of this set-up use.
  std::string key(const std::string& what) const;

  int size() const { return int(topology.ranks.size()); }
  /// The ranks of this host, by `local_rank`.
  const std::vector<int>& ranks_of_host() const { return topology.hosts[size_t(topology.host_of[size_t(rank)])]; }
  int local_rank() const { return topology.local_rank_of[size_t(rank)]; }
  int local_ranks() const { return int(memory.size()); }
  /// -1 for a rank of another host.
  int local_rank_of(int other) const {
    return topology.host_of[size_t(other)] == topology.host_of[size_t(rank)] ? topology.local_rank_of[size_t(other)]
                                                                             : -1;
  }
  /// As that rank sees it. 0 for a rank of another host or of this process, and for none (-1).
  pid_t pid_of(int other) const {
    const int s = other < 0 ? -1 : local_rank_of(other);
    return s >= 0 && peers[size_t(s)] ? peers[size_t(s)]->pid() : 0;
  }
  /// How to let that rank go on if it is stopped: "kill -CONT 4711". Empty if it runs, and for a rank of another host.
  std::string how_to_resume(int other) const;
  /// Its rank in the job, if the group has the ranks of the job, otherwise `other`.
  int global_rank(int other) const {
    return topology.global_ranks.empty() ? other : int(topology.global_ranks[size_t(other)]);
  }
  /// Those of these ranks of another group that are in this one too, as this one numbers them. None if one of the two
  /// lacks the ranks of the job.
  std::vector<int> ranks_of(const Members& other, const std::vector<int>& ranks) const;
  kernel::Pad pad(int local_rank) const { return {memory[size_t(local_rank)].pad, memory.size()}; }
  kernel::Pad own_pad() const { return pad(local_rank()); }

  /// "rank 1", or "rank 1 (global rank 3)" if its global rank differs.
  std::string rank_name(int of) const { return nvx::rank_name(of, topology.global_ranks); }
  std::string describe_local_rank(int local_rank) const {
    return topology.describe(ranks_of_host()[size_t(local_rank)]);
  }
  /// The same with the progress of that rank: "rank 3 (pid 4711, host a01, last finished: barrier)".
  std::string describe_progress(int local_rank) const;

  /// The same for any rank; of a rank of another host without the progress.
  std::string describe_awaited(int of) const {
    const int s = local_rank_of(of);
    return s >= 0 && of != rank ? describe_progress(s) : topology.describe(of);
  }

  /// For a wait for the rank, which calls it often: logs, once, that its process is stopped, or runs again.
  void warn_if_stopped(int local_rank) const;
  bool dead(int local_rank) const { return peers[size_t(local_rank)] && peers[size_t(local_rank)]->dead(); }
  /// The process of the rank has ended, and the rank had not left the group.
  bool died(int local_rank) const;
  /// The process of the rank has ended, or the rank has left the group.
  bool gone(int local_rank) const;
  /// The returned function is true once no peer can access the memory that this rank exported for the group. It may
  /// outlive this object.
  std::function<bool()> all_peers_gone() const;
  /// The same for memory that outlives the groups of this process, as a GPU's does: the function keeps the pads mapped.
  /// Those are in the host arena, whose own spans must not be freed by this function: the arena would keep itself.
  std::function<bool()> all_peers_gone_keeping_pads() const;
};

/// The values that `NVX_TUNE` and a group's option set. Reads the files that they name. Throws Error.
Overrides tuning_of(const std::string& option = {});

/// The facts on which a rank's plans depend. If hosts have different numbers of ranks, each host plans for its own
/// number; hosts need not agree on it.
PlanFacts facts_of(const Topology& topology, int rank, const Overrides& overrides = {});

/// Notifies ranks of other hosts why the group has failed here: the ranks with which this one has exchanged data, and
/// one rank of each host, which notifies its host. Best effort; see Messenger::flush_reports(). A failure reported by
/// another rank goes only to the former.
void notify_other_hosts(net::GroupPort& port, const Topology& topology, const Failure& failure);

}  // namespace nvx
