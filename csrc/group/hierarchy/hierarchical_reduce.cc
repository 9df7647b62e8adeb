// Reductions over several hosts. Each host sums first, so it sends one term.

#include <algorithm>
#include <cstring>

#include "group/hierarchy/hierarchical.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

using kernel::Collective;
using Across = schedule::Collective;

}  // namespace

Status Hierarchical::all_reduce(Call& call) {
  const InterHostPlan inter_host = inter_host_plan(call.o);
  return inter_host.by_leader ? all_reduce_by_leader(call, inter_host) : all_reduce_on_rails(call, inter_host);
}

/// One rank of each host gets the host's sum, exchanges it with the other hosts, and broadcasts the result.
Status Hierarchical::all_reduce_by_leader(Call& call, const InterHostPlan& inter_host) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width;
  const bool alone = local_ranks() == 1, leads = local_rank() == 0;
  if (!alone) {
    NVX_TRY(stage(call, {.collective = inter_host.before,
                         .root = 0,
                         .bytes = bytes,
                         .in = o.in,
                         .out = leads ? o.out : nullptr,
                         .count = o.count}));
  }
  if (leads) {
    Active& active = prepare(call, inter_host.row, leaders());
    active.args.layout.bytes = bytes;
    active.args.input = alone ? own_term(call, o.in, bytes, o.out) : o.out;
    active.args.output = o.out;
    begin(call, active);
    NVX_TRY(finish(call));
    divide(call, o.out, bytes);
  }
  if (alone) return {};
  Pieces recv(local_ranks());
  for (size_t s = 0; s < local_ranks(); ++s) recv[s] = {o.out, bytes};
  return stage(call, {.collective = inter_host.after, .root = 0, .bytes = bytes, .in = o.out, .recv = recv.data()});
}

/// For each slice: reduce-scatter inside the host, one part per rail; all-reduce of each part between hosts; all-gather
/// inside the host. While a slice is between hosts, the ranks sum the next ones.
Status Hierarchical::all_reduce_on_rails(Call& call, const InterHostPlan& inter_host) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width, slice = inter_host.slice / call.width * call.width;
  const bool alone = local_ranks() == 1;
  const auto part = [&](size_t k, size_t s) { return part_of({o.out, bytes}, slice, k, s, call.width); };
  const auto sum_inside = [&](size_t k) -> Status {
    Pieces send(local_ranks());
    for (size_t s = 0; s < local_ranks(); ++s) {
      const kernel::Piece p = part(k, s);
      send[s] = {const_cast<std::byte*>(o.in) + (p.data - o.out), p.bytes};
    }
    return stage(call, {.collective = inter_host.before,
                        .bytes = send.longest() * local_ranks(),
                        .out = part(k, local_rank()).data,
                        .send = send.data()});
  };
  const auto tell_inside = [&](size_t k) -> Status {
    Pieces recv(local_ranks());
    for (size_t s = 0; s < local_ranks(); ++s) recv[s] = part(k, s);
    return stage(
        call,
        {.collective = inter_host.after, .bytes = recv.longest(), .in = recv[local_rank()].data, .recv = recv.data()});
  };
  const auto issue = [&](size_t k) -> Status {
    if (!alone) NVX_TRY(sum_inside(k));
    if (!carries()) return {};
    const kernel::Piece mine = part(k, local_rank());
    Active& active = prepare(call, inter_host.row, rail(local_rank()));
    active.args.layout.bytes = mine.bytes;
    active.args.input = alone ? own_term(call, o.in + k * slice, mine.bytes, mine.data) : mine.data;
    active.args.output = mine.data;
    begin(call, active);
    return {};
  };
  const auto retire = [&](size_t k) -> Status {
    if (carries()) {
      NVX_TRY(finish(call));
      const kernel::Piece mine = part(k, local_rank());
      divide(call, mine.data, mine.bytes);
    }
    return alone ? Status() : tell_inside(k);
  };
  return overlap((bytes + slice - 1) / slice, issue, retire);
}

/// Reduces to one rank of each host, the root itself on the root's host, and from there to the root.
Status Hierarchical::reduce(Call& call) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width;
  const InterHostPlan inter_host = plan_between(Across::kReduce, o.planned(bytes), members_.facts);
  const size_t slice = inter_host.slice / call.width * call.width,
               slices = std::max<size_t>(1, (bytes + slice - 1) / slice);
  const PeerSet peers = leaders_with(o.root);
  const int mine = peers.members[host_], root_host = members_.topology.host_of[size_t(o.root)];
  const bool speaks = mine == members_.rank, alone = local_ranks() == 1, is_root = members_.rank == o.root;
  // A non-root rank sends sums from scratch. Each must stay until its run ends, so there is room for kSums.
  constexpr size_t kSums = kSlicesInFlight + 1;
  std::byte* const sums = speaks && !is_root ? room(std::min(bytes, kSums * slice)) : nullptr;
  for (size_t k = 0; k < slices; ++k) {
    const size_t at = k * slice, length = std::min(slice, bytes - at);
    if (active_.size() == kSums) NVX_TRY(finish(call));
    std::byte* const sum = is_root ? o.out + at : speaks ? sums + k % kSums * slice : nullptr;
    if (!alone) {
      NVX_TRY(stage(call, {.collective = inter_host.before,
                           .root = members_.topology.local_rank_of[size_t(mine)],
                           .bytes = length,
                           .in = o.in + at,
                           .out = sum,
                           .count = length / call.width}));
    }
    if (!speaks) continue;
    Active& active = prepare(call, inter_host.row, peers);
    active.args.layout.bytes = length;
    active.args.layout.root = root_host;
    active.args.input = alone ? own_term(call, o.in + at, length, sum) : sum;
    active.args.output = sum;
    begin(call, active);
  }
  NVX_TRY(finish_all(call));
  if (is_root) divide(call, o.out, bytes);
  return {};
}

/// The address of the host's terms for all hosts. They stay in the user's memory if they are final there and the
/// schedule can read them there; otherwise they are adjacent in a buffer, into which a rank that is alone on its host
/// copies its own.
const std::byte* Hierarchical::lay_out_terms(Call& call, Active& active, const std::vector<kernel::Piece>& terms) {
  if (local_ranks() == 1 && !call.terms.scales()) {
    const std::byte* const base = lay_out(terms, active.blocks);
    schedule::Layout layout = active.args.layout;
    layout.blocks = active.blocks;
    if (active.args.row->legal(layout)) return base;
    active.blocks.clear();
  }
  size_t total = 0;
  for (const kernel::Piece& t : terms) {
    active.blocks.push_back({total, t.bytes});
    total += t.bytes;
  }
  active.input.resize(total);
  for (size_t host = 0; host < terms.size() && local_ranks() == 1; ++host) {
    std::byte* const to = active.input.data() + active.blocks[host].offset;
    const std::byte* const from = own_term(call, terms[host].data, terms[host].bytes, to);
    if (from != to && terms[host].bytes != 0) std::memcpy(to, from, terms[host].bytes);
  }
  return active.input.data();
}

/// Slice by slice, and in each slice round by round, every rank gets the sum of its block. A rail gets it at once, any
/// other rank at the end, from the rail that serves it.
Status Hierarchical::reduce_scatter(Call& call) {
  Operation& o = call.o;
  const size_t longest = o.send.longest(), bytes = o.planned(longest * o.send.size());
  const InterHostPlan inter_host = inter_host_plan(o);
  const size_t slice = inter_host.slice / call.width * call.width;
  const Cut cut{slice, std::max<size_t>(1, (longest + slice - 1) / slice), bytes};
  // The results of ranks that this rail serves. Outlives the runs, also if one of them fails.
  std::byte* const for_others = rounds() > 1 && carries() ? room((rounds() - 1) * longest) : nullptr;
  const auto result = [&](size_t round) { return round == 0 ? o.out : for_others + (round - 1) * longest; };
  for (size_t k = 0; k < cut.chunks; ++k) {
    for (size_t round = 0; round < rounds(); ++round)
      NVX_TRY(sum_round(call, inter_host, cut, round, k, carries() ? result(round) + k * slice : nullptr));
  }
  NVX_TRY(finish_all(call));
  for (size_t round = 0; carries() && round < rounds(); ++round) {
    const int rank = rank_at(host_, local_rank() + round * rails());
    if (rank >= 0) divide(call, result(round), o.send[size_t(rank)].bytes);
  }
  return rounds() == 1 || local_ranks() == rails() ? Status() : deliver_beyond_rails(call, result);
}

/// Slice k of one round, in which every rail serves one rank of every host. The ranks of this host sum their blocks for
/// each host, so each rail has its host's terms for all hosts. Then its run sums these over hosts, and writes this
/// host's sum to `result`.
Status Hierarchical::sum_round(Call& call, const InterHostPlan& inter_host, const Cut& cut, size_t round, size_t k,
                               std::byte* result) {
  const size_t hosts = members_.topology.hosts.size();
  Active* const active = carries() ? &prepare(call, inter_host.row, rail(local_rank())) : nullptr;
  if (active) {
    std::vector<kernel::Piece> terms;
    for (size_t host = 0; host < hosts; ++host)
      terms.push_back(slice_of(call.o.send, cut, k, host, round, local_rank()));
    active->args.input = lay_out_terms(call, *active, terms);
  }
  for (size_t host = 0; host < hosts && local_ranks() > 1; ++host) {
    Pieces send(local_ranks());
    for (size_t s = 0; s < local_ranks(); ++s) send[s] = slice_of(call.o.send, cut, k, host, round, s);
    NVX_TRY(stage(call, {.collective = inter_host.before,
                         .bytes = send.longest() * local_ranks(),
                         .out = active ? active->input.data() + active->blocks[host].offset : nullptr,
                         .send = send.data()}));
  }
  if (!active) return {};
  active->args.output = result;
  begin(call, *active);
  return active_.size() > kSlicesInFlight ? finish(call) : Status();
}

/// Inside the host, rails send results to the ranks that they serve.
Status Hierarchical::deliver_beyond_rails(Call& call, const std::function<std::byte*(size_t round)>& result) {
  Pieces send(local_ranks()), recv(local_ranks());
  size_t total = 0;
  for (size_t round = 1; carries() && round < rounds(); ++round) {
    const size_t s = local_rank() + round * rails();
    if (s >= local_ranks()) continue;
    send[s] = {result(round), call.o.send[size_t(rank_at(host_, s))].bytes};
    total += send[s].bytes;
  }
  if (!carries()) recv[local_rank() % rails()] = {call.o.out, call.o.send[size_t(members_.rank)].bytes};
  return stage(call, {.collective = Collective::kAllToAll, .bytes = total, .send = send.data(), .recv = recv.data()});
}

}  // namespace nvx
