#pragma once

#include <vector>

#include "group/plan/chunks.h"
#include "group/setup/members.h"

namespace nvx {

/// One rank of each host, or a root and all ranks of other hosts. `members[place]` is this rank.
struct PeerSet {
  std::vector<int> members;
  int place = 0;
};

/// Which rank carries which part of the data between hosts. Pure.
///
/// Each `local_rank` that every host has is a rail. If hosts have different numbers of ranks, a higher `local_rank`
/// passes its data to the rail `local_rank % rails`, which serves its ranks in rounds.
class Rails {
 public:
  /// `members` must outlive it.
  explicit Rails(const Members& members) : members_(members) {}

  size_t count() const { return members_.facts.rails; }
  size_t rounds() const;  ///< until every rail has served each of its ranks
  size_t hosts() const { return members_.topology.hosts.size(); }
  size_t host() const { return host_of(members_.rank); }
  size_t host_of(int rank) const { return size_t(members_.topology.host_of[size_t(rank)]); }
  int local_rank_of(int rank) const { return members_.topology.local_rank_of[size_t(rank)]; }
  size_t local_ranks() const { return size_t(members_.local_ranks()); }
  size_t local_rank() const { return size_t(members_.local_rank()); }
  bool alone() const { return local_ranks() == 1; }
  bool carries() const { return local_rank() < count(); }
  /// Whether ranks of this host are no rails, so that rails carry data for them.
  bool serves_others() const { return rounds() > 1 && local_ranks() > count(); }

  int rank_at(size_t host, size_t local_rank) const;  ///< -1 if the host has no such `local_rank`
  PeerSet rail(size_t local_rank) const;
  PeerSet leaders_with(int root) const;  ///< the root on its host, `local_rank` 0 on the others
  PeerSet others_of(int root) const;     ///< the root, and all ranks of other hosts

  /// The rail's part of a slice, cut between elements. Empty if the `local_rank` is not a rail.
  kernel::Piece part_of(const kernel::Piece& slice, size_t rail, size_t width) const;
  /// Slice k of the block of the rank that this rail serves on that host in this round. Empty if there is no such rank.
  kernel::Piece slice_of(const Pieces& blocks, const Cut& cut, size_t k, size_t host, size_t round, size_t rail) const;

 private:
  const Members& members_;
};

}  // namespace nvx
