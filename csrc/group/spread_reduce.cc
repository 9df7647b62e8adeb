// What is combined, over several hosts: sums inside the host first, so that each host sends one term.

#include <algorithm>
#include <cstring>

#include "group/relay.h"
#include "group/spread.h"
#include "kernel/level.h"

namespace nvx {
namespace {

using kernel::Collective;
using Across = schedule::Collective;

/// The part of a slice that rail `i` of `rails` carries.
schedule::Block part_of(size_t bytes, size_t width, size_t i, size_t rails) {
  schedule::Layout layout;
  layout.width = width;
  return layout.part(bytes, int(i), int(rails));
}

/// Blocks of memory, as offsets from the lowest of them.
std::byte* base_of(const std::vector<kernel::Piece>& pieces) {
  std::byte* base = nullptr;
  for (const kernel::Piece& piece : pieces) {
    if (piece.bytes != 0 && (!base || piece.data < base)) base = piece.data;
  }
  return base;
}

}  // namespace

Status Spread::all_reduce(Call& call) {
  const size_t bytes = call.o.count * call.width;
  const Bridge bridge = plan_between(Across::kAllReduce, call.o.planned(bytes), group_.plan_facts());
  if (call.o.relay) return all_reduce_by_relay(call, bridge);
  return bridge.by_leader ? all_reduce_by_leader(call, bridge) : all_reduce_on_rails(call, bridge);
}

/// One rank of each host has the host's sum, exchanges it with the others', and tells its host.
Status Spread::all_reduce_by_leader(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width;
  const bool alone = seats() == 1, leads = seat() == 0;
  if (!alone) NVX_TRY(stage(call, bridge.before, 0, bytes, o.in, leads ? o.out : nullptr, o.count, nullptr, nullptr));
  if (leads) {
    active_.push_back(std::make_unique<Active>());
    active_.back()->members = leaders().members;
    net::Errand e = errand(call, bridge.row, leaders());
    e.layout.bytes = bytes;
    e.input = alone ? own_term(call, o.in, bytes, o.out) : o.out;
    e.output = o.out;
    begin(call, std::move(e));
    NVX_TRY(finish(call));
    if (call.divide) call.divide(o.out, o.count, group_.size());
  }
  if (alone) return {};
  Pieces recv(seats());
  for (size_t s = 0; s < seats(); ++s) recv[s] = {o.out, bytes};
  return stage(call, bridge.after, 0, bytes, o.out, nullptr, 0, nullptr, &recv);
}

/// Slice by slice: the host's sum of each rail's part, the parts' sums over all hosts, and all parts to all ranks of
/// the host. While a slice is between hosts, the next ones are summed inside.
Status Spread::all_reduce_on_rails(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width, slice = bridge.slice / call.width * call.width;
  const size_t slices = (bytes + slice - 1) / slice;
  const bool alone = seats() == 1;
  const auto length = [&](size_t k) { return std::min(slice, bytes - k * slice); };
  const auto part = [&](size_t k, size_t s) {
    const schedule::Block b = s < rails() ? part_of(length(k), call.width, s, rails()) : schedule::Block{};
    return kernel::Piece{o.out + k * slice + b.offset, b.bytes};
  };
  const auto sum_inside = [&](size_t k) -> Status {
    Pieces send(seats());
    size_t most = 0;
    for (size_t s = 0; s < seats(); ++s) {
      const kernel::Piece p = part(k, s);
      send[s] = {const_cast<std::byte*>(o.in) + (p.data - o.out), p.bytes};
      most = std::max(most, p.bytes);
    }
    return stage(call, bridge.before, -1, most * seats(), nullptr, part(k, seat()).data, 0, &send, nullptr);
  };
  const auto set_out = [&](size_t k) {
    const kernel::Piece mine = part(k, seat());
    active_.push_back(std::make_unique<Active>());
    active_.back()->members = rail(seat()).members;
    net::Errand e = errand(call, bridge.row, rail(seat()));
    e.layout.bytes = mine.bytes;
    e.input = alone ? own_term(call, o.in + k * slice, mine.bytes, mine.data) : mine.data;
    e.output = mine.data;
    begin(call, std::move(e));
  };
  const auto tell_inside = [&](size_t k) -> Status {
    Pieces recv(seats());
    size_t most = 0;
    for (size_t s = 0; s < seats(); ++s) {
      recv[s] = part(k, s);
      most = std::max(most, recv[s].bytes);
    }
    return stage(call, bridge.after, -1, most, recv[seat()].data, nullptr, 0, nullptr, &recv);
  };
  for (size_t k = 0; k < slices + kSlicesInFlight; ++k) {
    if (k < slices) {
      if (!alone) NVX_TRY(sum_inside(k));
      if (carries()) set_out(k);
    }
    if (k < kSlicesInFlight || k - kSlicesInFlight >= slices) continue;
    const size_t done = k - kSlicesInFlight;
    if (carries()) {
      NVX_TRY(finish(call));
      const kernel::Piece mine = part(done, seat());
      if (call.divide) call.divide(mine.data, mine.bytes / call.width, group_.size());
    }
    if (!alone) NVX_TRY(tell_inside(done));
  }
  return {};
}

/// The same slices, parts and sums, and so the same bits, where the steps inside the host are the relay's. While a
/// slice is between hosts, the next ones are summed and come to host memory, and the last one goes back. A kernel that
/// waits holds its device, so none begins before all ranks have called the same.
Status Spread::all_reduce_by_relay(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  Relay& relay = *o.relay;
  const size_t bytes = o.count * call.width, slice = bridge.slice / call.width * call.width;
  const size_t slices = (bytes + slice - 1) / slice;
  const auto length = [&](size_t k) { return std::min(slice, bytes - k * slice); };
  const auto part = [&](const std::byte* of, size_t k, size_t s) {
    const schedule::Block b = s < rails() ? part_of(length(k), call.width, s, rails()) : schedule::Block{};
    return kernel::Piece{const_cast<std::byte*>(of) + k * slice + b.offset, b.bytes};
  };
  const auto step = [&](Collective collective, size_t k) {
    Operation inside;
    inside.collective = collective, inside.dtype = o.dtype, inside.number = o.number;
    inside.count = length(k) / call.width;
    inside.op = o.op == ReduceOp::kAvg ? ReduceOp::kSum : o.op;  // divided when all hosts' sums are together
    inside.factor = o.factor;
    inside.timeout = o.timeout;
    inside.send = Pieces(seats()), inside.recv = Pieces(seats());
    for (size_t s = 0; s < seats(); ++s) {
      if (collective == Collective::kReduceScatter) inside.send[s] = part(o.in, k, s);
      if (collective == Collective::kAllGather) inside.recv[s] = part(o.out, k, s);
    }
    const kernel::Piece mine = part(o.out, k, seat());
    if (collective == Collective::kReduceScatter) inside.out = mine.data;
    if (collective == Collective::kAllGather) inside.in = mine.data;
    return inside;
  };
  NVX_TRY(barrier(call));
  NVX_TRY(relay.begin(part(o.out, 0, seat()).bytes));
  for (size_t k = 0; k < slices + Relay::kSlots - 1; ++k) {
    if (k < slices) NVX_TRY(relay.set_out(k, step(bridge.before, k), part(o.out, k, seat())));
    const size_t there = k - Relay::kAhead;  // at first none: beyond all slices
    if (there < slices) NVX_TRY(relay.arrive(there, call.rules.deadline, [this] { drive(); }));
    if (there < slices && carries()) {
      active_.push_back(std::make_unique<Active>());
      active_.back()->members = rail(seat()).members;
      net::Errand e = errand(call, bridge.row, rail(seat()));
      e.layout.bytes = part(o.out, there, seat()).bytes;
      e.input = e.output = relay.at(there);
      begin(call, std::move(e));
    }
    const size_t done = there - kSlicesInFlight;
    if (done >= slices) continue;
    const kernel::Piece mine = part(o.out, done, seat());
    if (carries()) {
      NVX_TRY(finish(call));
      if (call.divide) call.divide(relay.at(done), mine.bytes / call.width, group_.size());
    }
    NVX_TRY(relay.come_home(done, mine, step(bridge.after, done)));
  }
  return relay.end();
}

/// The host's sum at one of its ranks, which is the root on the root's host; and from there to the root.
Status Spread::reduce(Call& call) {
  Operation& o = call.o;
  const size_t bytes = o.count * call.width;
  const Bridge bridge = plan_between(Across::kReduce, o.planned(bytes), group_.plan_facts());
  const size_t slice = bridge.slice / call.width * call.width,
               slices = std::max<size_t>(1, (bytes + slice - 1) / slice);
  const Line line = line_to(o.root);
  const int mine = line.members[host_], root_host = group_.topology().host_of[size_t(o.root)];
  const bool speaks = mine == group_.rank(), alone = seats() == 1, is_root = group_.rank() == o.root;
  // Who is not the root needs its sums until they have gone up: no more of them than slices on their way.
  constexpr size_t kSums = kSlicesInFlight + 1;
  std::byte* const sums = speaks && !is_root ? room(std::min(bytes, kSums * slice)) : nullptr;
  for (size_t k = 0; k < slices; ++k) {
    const size_t at = k * slice, length = std::min(slice, bytes - at);
    if (active_.size() == kSums) NVX_TRY(finish(call));
    std::byte* const sum = is_root ? o.out + at : speaks ? sums + k % kSums * slice : nullptr;
    if (!alone) {
      NVX_TRY(stage(call, bridge.before, group_.topology().seat_of[size_t(mine)], length, o.in + at, sum,
                    length / call.width, nullptr, nullptr));
    }
    if (!speaks) continue;
    active_.push_back(std::make_unique<Active>());
    active_.back()->members = line.members;
    net::Errand e = errand(call, bridge.row, line);
    e.layout.bytes = length;
    e.layout.root = root_host;
    e.input = alone ? own_term(call, o.in + at, length, sum) : sum;
    e.output = sum;
    begin(call, std::move(e));
  }
  NVX_TRY(finish_all(call));
  if (call.divide && is_root) call.divide(o.out, o.count, group_.size());
  return {};
}

/// Where the host's terms for all hosts are: where the user has them, if they are final there and the schedule can take
/// them from there; else in a memory of their own, one behind the other, to which a rank that is alone copies its own.
const std::byte* Spread::lay_out_terms(Call& call, Active& active, const schedule::Row& row,
                                       const schedule::Layout& shape,
                                       const std::function<kernel::Piece(size_t)>& term) {
  const size_t hosts = size_t(shape.size);
  std::vector<kernel::Piece> terms;
  for (size_t host = 0; host < hosts; ++host) terms.push_back(term(host));
  if (seats() == 1 && call.o.op != ReduceOp::kPremulSum) {
    std::byte* const base = base_of(terms);
    for (const kernel::Piece& t : terms) active.blocks.push_back({t.bytes ? size_t(t.data - base) : 0, t.bytes});
    schedule::Layout layout = shape;
    layout.blocks = active.blocks;
    if (row.legal(layout)) return base;
    active.blocks.clear();
  }
  size_t total = 0;
  for (const kernel::Piece& t : terms) {
    active.blocks.push_back({total, t.bytes});
    total += t.bytes;
  }
  active.input.resize(total);
  for (size_t host = 0; host < hosts && seats() == 1; ++host) {
    std::byte* const to = active.input.data() + active.blocks[host].offset;
    const std::byte* const from = own_term(call, terms[host].data, terms[host].bytes, to);
    if (from != to && terms[host].bytes != 0) std::memcpy(to, from, terms[host].bytes);
  }
  return active.input.data();
}

/// For every host, and for every rank that a rail stands for there: the host's sum of that rank's block. Then the rail
/// sums over hosts, and every block is where its rank, or its rail, is.
Status Spread::reduce_scatter(Call& call) {
  Operation& o = call.o;
  const size_t hosts = group_.topology().hosts.size(), own_round = seat() / rails();
  size_t longest = 0;
  for (size_t r = 0; r < o.send.size(); ++r) longest = std::max(longest, o.send[r].bytes);
  const size_t bytes = o.planned(longest * o.send.size());
  const Bridge bridge = plan_between(Across::kReduceScatter, bytes, group_.plan_facts());
  const size_t slice = bridge.slice / call.width * call.width,
               slices = std::max<size_t>(1, (longest + slice - 1) / slice);
  const bool alone = seats() == 1;
  const auto block = [&](int rank, size_t k) -> kernel::Piece {
    if (rank < 0) return {};
    const kernel::Piece whole = o.send[size_t(rank)];
    const size_t at = std::min(whole.bytes, k * slice);
    return {advance(whole, at), std::min(slice, whole.bytes - at)};
  };
  // The results of ranks that this rail stands for. Outlives the errands, also when one of them fails.
  std::byte* const for_others = rounds() > 1 && carries() ? room(rounds() * longest) : nullptr;
  const auto result = [&](size_t round, size_t k) {
    return round == 0 ? o.out + k * slice : for_others + round * longest + k * slice;
  };
  for (size_t k = 0; k < slices; ++k) {
    for (size_t round = 0; round < rounds(); ++round) {
      active_.push_back(std::make_unique<Active>());
      Active& active = *active_.back();
      net::Errand e = errand(call, bridge.row, rail(seat()));
      active.members = rail(seat()).members;
      const auto blocks_of_host = [&](size_t host) {
        Pieces send(seats());
        for (size_t s = 0; s < rails(); ++s) send[s] = block(rank_at(host, s + round * rails()), k);
        return send;
      };
      if (carries())
        e.input = lay_out_terms(call, active, *bridge.row, e.layout,
                                [&](size_t host) { return blocks_of_host(host)[seat()]; });
      for (size_t host = 0; host < hosts && !alone; ++host) {
        const Pieces send = blocks_of_host(host);
        size_t most = 0;
        for (size_t s = 0; s < rails(); ++s) most = std::max(most, send[s].bytes);
        std::byte* const sum = carries() ? active.input.data() + active.blocks[host].offset : nullptr;
        NVX_TRY(stage(call, bridge.before, -1, most * seats(), nullptr, sum, 0, &send, nullptr));
      }
      if (!carries()) {
        active_.pop_back();
        continue;
      }
      e.layout.blocks = active.blocks;
      e.output = result(round, k);
      begin(call, std::move(e));
      if (active_.size() > kSlicesInFlight) NVX_TRY(finish(call));
    }
  }
  NVX_TRY(finish_all(call));
  if (carries() && call.divide) {
    for (size_t round = 0; round < rounds(); ++round) {
      const int rank = rank_at(host_, seat() + round * rails());
      if (rank >= 0) call.divide(result(round, 0), o.send[size_t(rank)].bytes / call.width, group_.size());
    }
  }
  if (rounds() == 1 || seats() == rails()) return {};
  // Results of ranks beyond the rails, to them.
  Pieces send(seats()), recv(seats());
  size_t total = 0;
  for (size_t round = 1; carries() && round < rounds(); ++round) {
    const size_t s = seat() + round * rails();
    if (s >= seats()) continue;
    send[s] = {result(round, 0), o.send[size_t(rank_at(host_, s))].bytes};
    total += send[s].bytes;
  }
  if (own_round > 0) recv[seat() % rails()] = {o.out, o.send[size_t(group_.rank())].bytes};
  return stage(call, Collective::kAllToAll, -1, total, nullptr, nullptr, 0, &send, &recv);
}

}  // namespace nvx
