#include "group/hierarchy/rails.h"

#include <algorithm>

namespace nvx {

using kernel::Piece;

size_t Rails::rounds() const {
  size_t most = 0;
  for (const std::vector<int>& host : members_.topology.hosts) most = std::max(most, host.size());
  return ceil_div(most, count());
}

int Rails::rank_at(size_t host, size_t local_rank) const {
  const std::vector<int>& there = members_.topology.hosts[host];
  return local_rank < there.size() ? there[local_rank] : -1;
}

PeerSet Rails::rail(size_t local_rank) const {
  PeerSet peers{{}, int(host())};
  for (size_t h = 0; h < hosts(); ++h) peers.members.push_back(rank_at(h, local_rank));
  return peers;
}

PeerSet Rails::leaders_with(int root) const {
  PeerSet peers = rail(0);
  peers.members[host_of(root)] = root;
  return peers;
}

PeerSet Rails::others_of(int root) const {
  PeerSet peers{{root}, 0};
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (host_of(rank) == host_of(root)) continue;
    if (rank == members_.rank) peers.place = int(peers.members.size());
    peers.members.push_back(rank);
  }
  return peers;
}

Piece Rails::part_of(const Piece& slice, size_t rail, size_t width) const {
  schedule::Layout layout;
  layout.width = width;
  const schedule::Block b = rail < count() ? layout.part(slice.bytes, int(rail), int(count())) : schedule::Block{};
  return {kernel::advance(slice, b.offset), b.bytes};
}

Piece Rails::slice_of(const Pieces& blocks, const Cut& cut, size_t k, size_t host, size_t round, size_t rail) const {
  const int rank = rail < count() ? rank_at(host, rail + round * count()) : -1;
  return rank < 0 ? Piece{} : cut.of(blocks[size_t(rank)], k);
}

}  // namespace nvx
