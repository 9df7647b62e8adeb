// What is moved, over several hosts: every byte crosses to a host once, and inside it from there.

#include <algorithm>
#include <cstring>

#include "group/spread.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;
using Across = schedule::Collective;

constexpr size_t kMostPacked = 16 << 10;  ///< bytes of a rail up to which a copy costs less than a step inside the host

/// Pieces as offsets from the lowest of them.
std::byte* lay_out(const std::vector<Piece>& pieces, std::vector<schedule::Block>& blocks) {
  std::byte* base = nullptr;
  for (const Piece& piece : pieces) {
    if (piece.bytes != 0 && (!base || piece.data < base)) base = piece.data;
  }
  for (const Piece& piece : pieces) blocks.push_back({piece.bytes ? size_t(piece.data - base) : 0, piece.bytes});
  return base;
}

}  // namespace

/// From the root to one rank of each other host, and inside each host from there, slice by slice.
Status Spread::broadcast(Call& call) {
  Operation& o = call.o;
  const size_t bytes = o.recv[0].bytes;
  std::byte* const out = o.recv[0].data;
  const Bridge bridge = plan_between(Across::kBroadcast, bytes, group_.plan_facts());
  const size_t slice = bridge.slice, slices = std::max<size_t>(1, (bytes + slice - 1) / slice);
  const Line line = line_to(o.root);
  const int mine = line.members[host_];
  const bool speaks = mine == group_.rank(), is_root = o.root == group_.rank();
  const auto length = [&](size_t k) { return std::min(slice, bytes - k * slice); };
  const auto set_out = [&](size_t k) {
    active_.push_back(std::make_unique<Active>());
    active_.back()->members = line.members;
    net::Errand e = errand(call, bridge.row, line);
    e.layout.bytes = length(k);
    e.layout.width = 1;
    e.layout.root = group_.topology().host_of[size_t(o.root)];
    e.input = (is_root ? o.in : out) + k * slice;
    e.output = out + k * slice;
    begin(call, std::move(e));
  };
  for (size_t k = 0; k < slices + kSlicesInFlight; ++k) {
    if (k < slices && speaks) set_out(k);
    if (k < kSlicesInFlight || k - kSlicesInFlight >= slices) continue;
    const size_t done = k - kSlicesInFlight;
    if (speaks) NVX_TRY(finish(call));
    if (seats() == 1) continue;
    Pieces recv(seats());
    for (size_t s = 0; s < seats(); ++s) recv[s] = {out + done * slice, length(done)};
    NVX_TRY(stage(call, bridge.after, group_.topology().seat_of[size_t(mine)], length(done), out + done * slice,
                  nullptr, 0, nullptr, &recv));
  }
  return {};
}

/// Every rail gathers the blocks of its seat on all hosts, and hands them out inside; seats beyond the rails lend their
/// blocks to a rail first.
Status Spread::all_gather(Call& call) {
  Operation& o = call.o;
  const size_t hosts = group_.topology().hosts.size();
  size_t longest = 0;
  Blocks alike = rounds() == 1 ? Blocks::kAlike : Blocks::kOfAnySize;
  for (size_t r = 0; r < o.recv.size(); ++r) {
    longest = std::max(longest, o.recv[r].bytes);
    if (o.recv[r].bytes != o.recv[0].bytes) alike = Blocks::kOfAnySize;
  }
  const Bridge bridge = plan_between(Across::kAllGather, longest, group_.plan_facts(), alike);
  const size_t slice = bridge.slice, slices = std::max<size_t>(1, (longest + slice - 1) / slice);
  if (rounds() > 1 && seats() > rails()) {
    Pieces send(seats()), recv(seats());
    if (!carries()) send[seat() % rails()] = {const_cast<std::byte*>(o.in), o.recv[size_t(group_.rank())].bytes};
    for (size_t s = rails(); carries() && s < seats(); ++s) {
      if (s % rails() == seat()) recv[s] = o.recv[size_t(rank_at(host_, s))];
    }
    const size_t total = carries() ? 0 : send[seat() % rails()].bytes;
    NVX_TRY(stage(call, Collective::kAllToAll, -1, total, nullptr, nullptr, 0, &send, &recv));
  }
  const auto block = [&](size_t host, size_t round, size_t s, size_t k) -> Piece {
    const int rank = s < rails() ? rank_at(host, s + round * rails()) : -1;
    if (rank < 0) return {};
    const Piece whole = o.recv[size_t(rank)];
    const size_t at = std::min(whole.bytes, k * slice);
    return {advance(whole, at), std::min(slice, whole.bytes - at)};
  };
  const auto set_out = [&](size_t round, size_t k) {
    active_.push_back(std::make_unique<Active>());
    Active& active = *active_.back();
    active.members = rail(seat()).members;
    net::Errand e = errand(call, bridge.row, rail(seat()));
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(block(host, round, seat(), k));
    e.output = lay_out(pieces, active.blocks);
    e.layout.blocks = active.blocks;
    e.layout.width = 1;
    e.input = round == 0 ? o.in + std::min(o.recv[size_t(group_.rank())].bytes, k * slice) : pieces[host_].data;
    begin(call, std::move(e));
  };
  const auto tell_inside = [&](size_t round, size_t k) -> Status {
    if (longest * hosts <= kMostPacked)
      return tell_packed(call, [&](size_t host, size_t s) { return block(host, round, s, k); });
    for (size_t host = 0; host < hosts; ++host) {
      Pieces recv(seats());
      size_t most = 0;
      for (size_t s = 0; s < seats(); ++s) {
        recv[s] = block(host, round, s, k);
        most = std::max(most, recv[s].bytes);
      }
      NVX_TRY(stage(call, bridge.after, -1, most, recv[seat()].data, nullptr, 0, nullptr, &recv));
    }
    return {};
  };
  const size_t steps = slices * rounds();
  for (size_t i = 0; i < steps + kSlicesInFlight; ++i) {
    if (i < steps && carries()) set_out(i % rounds(), i / rounds());
    if (i < kSlicesInFlight || i - kSlicesInFlight >= steps) continue;
    const size_t done = i - kSlicesInFlight;
    if (carries()) NVX_TRY(finish(call));
    if (seats() > 1) NVX_TRY(tell_inside(done % rounds(), done / rounds()));
  }
  return {};
}

/// What every rail has gathered, to all ranks of the host in one step however many hosts there are.
Status Spread::tell_packed(Call& call, const std::function<Piece(size_t host, size_t seat)>& block) {
  const size_t hosts = group_.topology().hosts.size();
  Pieces recv(seats());
  size_t total = 0, most = 0;
  for (size_t s = 0; s < seats(); ++s) {
    for (size_t host = 0; host < hosts; ++host) recv[s].bytes += block(host, s).bytes;
    total += recv[s].bytes;
    most = std::max(most, recv[s].bytes);
  }
  std::byte* at = room(total);
  for (size_t s = 0; s < seats(); ++s) at = (recv[s].data = at) + recv[s].bytes;
  const auto move = [&](size_t s, bool pack) {
    std::byte* packed = recv[s].data;
    for (size_t host = 0; host < hosts; ++host) {
      const Piece piece = block(host, s);
      if (piece.bytes != 0) std::memcpy(pack ? packed : piece.data, pack ? piece.data : packed, piece.bytes);
      packed += piece.bytes;
    }
  };
  move(seat(), /*pack=*/true);
  NVX_TRY(stage(call, Collective::kAllGather, -1, most, recv[seat()].data, nullptr, 0, nullptr, &recv));
  for (size_t s = 0; s < seats(); ++s) {
    if (s != seat()) move(s, /*pack=*/false);
  }
  return {};
}

/// Blocks of other hosts come straight to the root; those of its own through memory.
Status Spread::gather(Call& call) {
  Operation& o = call.o;
  const int root_seat = group_.seat_of(o.root);
  const bool is_root = o.root == group_.rank();
  if (is_root || root_seat < 0) {
    active_.push_back(std::make_unique<Active>());
    Active& active = *active_.back();
    const Line line = others_of(o.root);
    active.members = line.members;
    std::vector<Piece> pieces(line.members.size());
    if (is_root) {
      for (size_t p = 1; p < pieces.size(); ++p) pieces[p] = o.recv[size_t(line.members[p])];
    } else {
      pieces[size_t(line.place)] = o.send[size_t(o.root)];
    }
    std::byte* const base = lay_out(pieces, active.blocks);
    net::Errand e = errand(call, plan_between(Across::kGather, 0, group_.plan_facts()).row, line);
    e.layout.blocks = active.blocks;
    e.layout.width = 1;
    (is_root ? e.output : const_cast<std::byte*&>(e.input)) = base;
    begin(call, std::move(e));
  }
  if (root_seat >= 0) NVX_TRY(exchange_inside(call, Collective::kGather, root_seat));
  return finish_all(call);
}

Status Spread::scatter(Call& call) {
  Operation& o = call.o;
  const int root_seat = group_.seat_of(o.root);
  const bool is_root = o.root == group_.rank();
  if (is_root || root_seat < 0) {
    active_.push_back(std::make_unique<Active>());
    Active& active = *active_.back();
    const Line line = others_of(o.root);
    active.members = line.members;
    std::vector<Piece> pieces(line.members.size());
    if (is_root) {
      for (size_t p = 1; p < pieces.size(); ++p) pieces[p] = o.send[size_t(line.members[p])];
    } else {
      pieces[size_t(line.place)] = o.recv[size_t(o.root)];
    }
    std::byte* const base = lay_out(pieces, active.blocks);
    net::Errand e = errand(call, plan_between(Across::kScatter, 0, group_.plan_facts()).row, line);
    e.layout.blocks = active.blocks;
    e.layout.width = 1;
    (is_root ? const_cast<std::byte*&>(e.input) : e.output) = base;
    begin(call, std::move(e));
  }
  if (root_seat >= 0) NVX_TRY(exchange_inside(call, Collective::kScatter, root_seat));
  return finish_all(call);
}

/// What comes from one host may come before what is due to another has gone: where both are the same memory, it goes
/// from a copy.
void Spread::set_apart(Operation& o, std::vector<std::byte>& room) const {
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

Status Spread::all_to_all(Call& call) {
  Operation& o = call.o;
  active_.push_back(std::make_unique<Active>());
  Active& active = *active_.back();
  set_apart(o, active.input);
  Line all;
  std::vector<Piece> to, from;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const bool inside = group_.seat_of(rank) >= 0;
    active.members.push_back(rank);
    active.absent.push_back(inside);
    to.push_back(inside ? Piece{} : o.send[size_t(rank)]);
    from.push_back(inside ? Piece{} : o.recv[size_t(rank)]);
  }
  all.members = active.members;
  all.place = group_.rank();
  net::Errand e = errand(call, plan_between(Across::kAllToAll, 0, group_.plan_facts()).row, all);
  e.input = lay_out(to, active.blocks);
  e.output = lay_out(from, active.more_blocks);
  e.layout.to = active.blocks;
  e.layout.from = active.more_blocks;
  e.layout.width = 1;
  begin(call, std::move(e));
  NVX_TRY(exchange_inside(call, Collective::kAllToAll, -1));
  return finish_all(call);
}

/// The pieces between ranks of this host, and the own one.
Status Spread::exchange_inside(Call& call, Collective collective, int root_seat) {
  Pieces send(seats()), recv(seats());
  size_t total = 0;
  for (size_t s = 0; s < seats(); ++s) {
    const size_t rank = size_t(rank_at(host_, s));
    if (rank < call.o.send.size()) send[s] = call.o.send[rank];
    if (rank < call.o.recv.size()) recv[s] = call.o.recv[rank];
    if (s != seat()) total += send[s].bytes;
  }
  return stage(call, collective, root_seat, total, nullptr, nullptr, 0, &send, &recv);
}

/// A rank and all ranks of other hosts.
Spread::Line Spread::others_of(int root) const {
  Line line{{root}, 0};
  const std::vector<int>& host_of = group_.topology().host_of;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (host_of[size_t(rank)] == host_of[size_t(root)]) continue;
    if (rank == group_.rank()) line.place = int(line.members.size());
    line.members.push_back(rank);
  }
  return line;
}

Status Spread::barrier(Call& call) {
  Pieces none(seats());
  if (seats() > 1) NVX_TRY(stage(call, Collective::kBarrier, -1, 0, nullptr, nullptr, 0, &none, &none));
  if (seat() == 0) {
    active_.push_back(std::make_unique<Active>());
    active_.back()->members = leaders().members;
    begin(call, errand(call, plan_between(Across::kBarrier, 0, group_.plan_facts()).row, leaders()));
    NVX_TRY(finish(call));
  }
  if (seats() == 1) return {};
  return stage(call, Collective::kBarrier, -1, 0, nullptr, nullptr, 0, &none, &none);
}

}  // namespace nvx
