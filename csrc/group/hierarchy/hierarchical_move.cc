// Collectives that move data over several hosts. Every byte crosses to a host once, and is distributed there.

#include <algorithm>
#include <cstring>

#include "group/hierarchy/hierarchical.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;
using Across = schedule::Collective;

constexpr size_t kMostPacked =
    16 << 10;  ///< bytes of a rail, up to which a copy costs less than a step inside the host

}  // namespace

/// Slice by slice: from the root to one rank of each other host, and from there to the other ranks of the host.
Status Hierarchical::broadcast(Call& call) {
  Operation& o = call.o;
  const size_t bytes = o.recv[0].bytes;
  std::byte* const out = o.recv[0].data;
  const InterHostPlan inter_host = plan_between(Across::kBroadcast, bytes, members_.facts);
  const size_t slice = inter_host.slice, slices = std::max<size_t>(1, (bytes + slice - 1) / slice);
  const PeerSet peers = leaders_with(o.root);
  const int mine = peers.members[host_];
  const bool speaks = mine == members_.rank, is_root = o.root == members_.rank;
  const auto length = [&](size_t k) { return std::min(slice, bytes - k * slice); };
  const auto issue = [&](size_t k) -> Status {
    if (!speaks) return {};
    Active& active = prepare(call, inter_host.row, peers);
    active.args.layout.bytes = length(k);
    active.args.layout.root = members_.topology.host_of[size_t(o.root)];
    active.args.input = (is_root ? o.in : out) + k * slice;
    active.args.output = out + k * slice;
    begin(call, active);
    return {};
  };
  const auto retire = [&](size_t k) -> Status {
    if (speaks) NVX_TRY(finish(call));
    if (local_ranks() == 1) return {};
    Pieces recv(local_ranks());
    for (size_t s = 0; s < local_ranks(); ++s) recv[s] = {out + k * slice, length(k)};
    return stage(call, {.collective = inter_host.after,
                        .root = members_.topology.local_rank_of[size_t(mine)],
                        .bytes = length(k),
                        .in = out + k * slice,
                        .recv = recv.data()});
  };
  return overlap(slices, issue, retire);
}

/// Every rail gathers the blocks of its `local_rank` on all hosts, and distributes them inside its host. Other ranks
/// first hand their blocks to a rail.
Status Hierarchical::all_gather(Call& call) {
  Operation& o = call.o;
  const size_t hosts = members_.topology.hosts.size(), longest = o.recv.longest();
  const InterHostPlan inter_host = inter_host_plan(o);
  const Cut cut{inter_host.slice, std::max<size_t>(1, (longest + inter_host.slice - 1) / inter_host.slice), longest};
  if (rounds() > 1 && local_ranks() > rails()) NVX_TRY(lend_to_rails(call));
  const auto block = [&](size_t host, size_t round, size_t s, size_t k) {
    return slice_of(o.recv, cut, k, host, round, s);
  };
  const auto tell_inside = [&](size_t round, size_t k) -> Status {
    if (longest * hosts <= kMostPacked)
      return tell_packed(call, [&](size_t host, size_t s) { return block(host, round, s, k); });
    for (size_t host = 0; host < hosts; ++host) {
      Pieces recv(local_ranks());
      for (size_t s = 0; s < local_ranks(); ++s) recv[s] = block(host, round, s, k);
      NVX_TRY(stage(call, {.collective = inter_host.after,
                           .bytes = recv.longest(),
                           .in = recv[local_rank()].data,
                           .recv = recv.data()}));
    }
    return {};
  };
  const auto issue = [&](size_t i) -> Status {
    if (!carries()) return {};
    const size_t round = i % rounds(), k = i / rounds();
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(block(host, round, local_rank(), k));
    Active& active = prepare(call, inter_host.row, rail(local_rank()));
    active.args.output = lay_out(pieces, active.blocks);
    active.args.input = pieces[host_].data;
    if (round == 0) active.args.input = o.in + std::min(o.recv[size_t(members_.rank)].bytes, k * cut.slice);
    begin(call, active);
    return {};
  };
  const auto retire = [&](size_t i) -> Status {
    if (carries()) NVX_TRY(finish(call));
    return local_ranks() > 1 ? tell_inside(i % rounds(), i / rounds()) : Status();
  };
  return overlap(cut.chunks * rounds(), issue, retire);
}

/// Inside the host, ranks that are not rails send their blocks to the rails that serve them.
Status Hierarchical::lend_to_rails(Call& call) {
  Operation& o = call.o;
  Pieces send(local_ranks()), recv(local_ranks());
  if (!carries()) send[local_rank() % rails()] = {const_cast<std::byte*>(o.in), o.recv[size_t(members_.rank)].bytes};
  for (size_t s = rails(); carries() && s < local_ranks(); ++s) {
    if (s % rails() == local_rank()) recv[s] = o.recv[size_t(rank_at(host_, s))];
  }
  const size_t total = carries() ? 0 : send[local_rank() % rails()].bytes;
  return stage(call, {.collective = Collective::kAllToAll, .bytes = total, .send = send.data(), .recv = recv.data()});
}

/// Distributes the blocks of all rails in the host, in one step for any number of hosts.
Status Hierarchical::tell_packed(Call& call, const std::function<Piece(size_t host, size_t local_rank)>& block) {
  const size_t hosts = members_.topology.hosts.size();
  Pieces recv(local_ranks());
  size_t total = 0;
  for (size_t s = 0; s < local_ranks(); ++s) {
    for (size_t host = 0; host < hosts; ++host) recv[s].bytes += block(host, s).bytes;
    total += recv[s].bytes;
  }
  std::byte* at = room(total);
  for (size_t s = 0; s < local_ranks(); ++s) at = (recv[s].data = at) + recv[s].bytes;
  const auto move = [&](size_t s, bool pack) {
    std::byte* packed = recv[s].data;
    for (size_t host = 0; host < hosts; ++host) {
      const Piece piece = block(host, s);
      if (piece.bytes != 0) std::memcpy(pack ? packed : piece.data, pack ? piece.data : packed, piece.bytes);
      packed += piece.bytes;
    }
  };
  move(local_rank(), /*pack=*/true);
  NVX_TRY(stage(call, {.collective = Collective::kAllGather,
                       .bytes = recv.longest(),
                       .in = recv[local_rank()].data,
                       .recv = recv.data()}));
  for (size_t s = 0; s < local_ranks(); ++s) {
    if (s != local_rank()) move(s, /*pack=*/false);
  }
  return {};
}

/// Gather or scatter: blocks of other hosts go directly to or from the root, blocks of its own host through shared
/// memory.
Status Hierarchical::to_or_from_root(Call& call, Direction direction) {
  Operation& o = call.o;
  const bool gathers = direction == Direction::kToRoot, is_root = o.root == members_.rank;
  const Collective collective = gathers ? Collective::kGather : Collective::kScatter;
  const int root_local_rank = members_.local_rank_of(o.root);
  if (is_root || root_local_rank < 0) {
    const PeerSet peers = others_of(o.root);
    std::vector<Piece> pieces(peers.members.size());
    if (is_root) {
      const Pieces& theirs = gathers ? o.recv : o.send;
      for (size_t p = 1; p < pieces.size(); ++p) pieces[p] = theirs[size_t(peers.members[p])];
    } else {
      pieces[size_t(peers.place)] = (gathers ? o.send : o.recv)[size_t(o.root)];
    }
    Active& active = prepare(call, plan_between(across(collective), 0, members_.facts).row, peers);
    std::byte* const base = lay_out(pieces, active.blocks);
    const bool sends = is_root != gathers;
    if (sends) {
      active.args.input = base;
    } else {
      active.args.output = base;
    }
    begin(call, active);
  }
  if (root_local_rank >= 0) NVX_TRY(exchange_inside(call, collective, root_local_rank));
  return finish_all(call);
}

/// Data from one host may arrive before the data for another one has been sent. If input and output overlap, a copy is
/// sent.
void Hierarchical::set_apart(Operation& o, std::vector<std::byte>& room) const {
  const auto meet = [](const Piece& a, const Piece& b) {
    return a.bytes != 0 && b.bytes != 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
  };
  bool apart = true;
  size_t total = 0;
  for (size_t r = 0; r < o.send.size(); ++r) {
    total += o.send[r].bytes;
    for (size_t q = 0; q < o.recv.size() && apart; ++q) apart = !meet(o.send[r], o.recv[q]);
  }
  if (apart) return;
  room.resize(total);
  std::byte* to = room.data();
  for (size_t r = 0; r < o.send.size(); ++r) {
    if (o.send[r].bytes != 0) std::memcpy(to, o.send[r].data, o.send[r].bytes);
    o.send[r].data = to;
    to += o.send[r].bytes;
  }
}

/// Pieces for ranks of other hosts go directly to those ranks, pieces for ranks of this host through shared memory.
Status Hierarchical::all_to_all(Call& call) {
  Operation& o = call.o;
  PeerSet all{{}, members_.rank};
  for (int rank = 0; rank < members_.size(); ++rank) all.members.push_back(rank);
  Active& active = prepare(call, plan_between(Across::kAllToAll, 0, members_.facts).row, all);
  set_apart(o, active.input);
  std::vector<Piece> to, from;
  for (int rank = 0; rank < members_.size(); ++rank) {
    const bool inside = members_.local_rank_of(rank) >= 0;
    active.absent.push_back(inside);
    to.push_back(inside ? Piece{} : o.send[size_t(rank)]);
    from.push_back(inside ? Piece{} : o.recv[size_t(rank)]);
  }
  active.args.input = lay_out(to, active.to);
  active.args.output = lay_out(from, active.from);
  begin(call, active);
  NVX_TRY(exchange_inside(call, Collective::kAllToAll, -1));
  return finish_all(call);
}

/// Exchanges the pieces between ranks of this host, and this rank's own.
Status Hierarchical::exchange_inside(Call& call, Collective collective, int root_local_rank) {
  Pieces send(local_ranks()), recv(local_ranks());
  size_t total = 0;
  for (size_t s = 0; s < local_ranks(); ++s) {
    const size_t rank = size_t(rank_at(host_, s));
    if (rank < call.o.send.size()) send[s] = call.o.send[rank];
    if (rank < call.o.recv.size()) recv[s] = call.o.recv[rank];
    if (s != local_rank()) total += send[s].bytes;
  }
  return stage(
      call,
      {.collective = collective, .root = root_local_rank, .bytes = total, .send = send.data(), .recv = recv.data()});
}

/// A rank and all ranks of other hosts.
Hierarchical::PeerSet Hierarchical::others_of(int root) const {
  PeerSet peers{{root}, 0};
  const std::vector<int>& host_of = members_.topology.host_of;
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (host_of[size_t(rank)] == host_of[size_t(root)]) continue;
    if (rank == members_.rank) peers.place = int(peers.members.size());
    peers.members.push_back(rank);
  }
  return peers;
}

Status Hierarchical::barrier(Call& call) {
  Pieces none(local_ranks());
  const auto meet_inside = [&] {
    return local_ranks() == 1
               ? Status()
               : stage(call, {.collective = Collective::kBarrier, .send = none.data(), .recv = none.data()});
  };
  NVX_TRY(meet_inside());
  if (local_rank() == 0) {
    begin(call, prepare(call, plan_between(Across::kBarrier, 0, members_.facts).row, leaders()));
    NVX_TRY(finish(call));
  }
  return meet_inside();
}

}  // namespace nvx
