// Collectives whose blocks go directly from rank to rank: between hosts in a run, inside the host in one step.

#include "group/hierarchy/hierarchical.h"

namespace nvx {

using kernel::Collective;
using kernel::Piece;

/// Gather or scatter: blocks of other hosts go directly from or to the root, those of its host by shared memory.
Status Hierarchical::to_or_from_root(Call& call) {
  Operation& o = call.o;
  const bool gathers = o.collective == Collective::kGather, is_root = o.root == members_.rank;
  const bool root_is_here = members_.local_rank_of(o.root) >= 0;
  if (is_root || !root_is_here) {
    const PeerSet peers = rails_.others_of(o.root);
    std::vector<Piece> pieces(peers.members.size());
    if (is_root) {
      const Pieces& theirs = gathers ? o.recv : o.send;
      for (size_t p = 1; p < pieces.size(); ++p) pieces[p] = theirs[size_t(peers.members[p])];
    } else {
      pieces[size_t(peers.place)] = (gathers ? o.send : o.recv)[size_t(o.root)];
    }
    Active& active = prepare(call, plan_between(across(o.collective), 0, facts_).row, peers);
    std::byte* const base = lay_out(pieces, active.blocks);
    const bool sends = is_root != gathers;
    if (sends) {
      active.args.input = base;
    } else {
      active.args.output = base;
    }
    begin(call, active);
  }
  if (root_is_here) NVX_TRY(exchange_inside(call));
  return finish_all(call);
}

/// Pieces for ranks of other hosts go directly to those ranks, pieces for ranks of this host through shared memory.
Status Hierarchical::all_to_all(Call& call) {
  Operation& o = call.o;
  PeerSet all{{}, members_.rank};
  for (int rank = 0; rank < members_.size(); ++rank) all.members.push_back(rank);
  Active& active = prepare(call, plan_between(schedule::Collective::kAllToAll, 0, facts_).row, all);
  send_copy_if_overlapping(o, active.input);  // data from one host may arrive before that for another has been sent
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
  NVX_TRY(exchange_inside(call));
  return finish_all(call);
}

/// Exchanges the pieces between ranks of this host, and this rank's own.
Status Hierarchical::exchange_inside(Call& call) {
  const Operation& o = call.o;
  Operation step;
  step.collective = o.collective;
  step.root = o.root < 0 ? -1 : members_.local_rank_of(o.root);
  step.send = Pieces(rails_.local_ranks()), step.recv = Pieces(rails_.local_ranks());
  for (size_t l = 0; l < rails_.local_ranks(); ++l) {
    const size_t rank = size_t(rails_.rank_at(rails_.host(), l));
    if (rank < o.send.size()) step.send[l] = o.send[rank];
    if (rank < o.recv.size()) step.recv[l] = o.recv[rank];
  }
  return run_inside(call, step);
}

Status Hierarchical::barrier(Call& call) {
  Operation step;
  step.collective = Collective::kBarrier;
  step.send = Pieces(rails_.local_ranks()), step.recv = Pieces(rails_.local_ranks());
  if (!rails_.alone()) NVX_TRY(run_inside(call, step));
  if (rails_.local_rank() == 0) {
    begin(call, prepare(call, plan_between(schedule::Collective::kBarrier, 0, facts_).row, rails_.rail(0)));
    NVX_TRY(finish(call));
  }
  return rails_.alone() ? Status() : run_inside(call, step);
}

}  // namespace nvx
