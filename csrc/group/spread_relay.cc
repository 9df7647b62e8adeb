// Collectives over several hosts whose steps inside each host are a relay's, as their data is on devices: the sums, and
// so the bits, are those of spread_reduce.cc.

#include <algorithm>

#include "group/relay.h"
#include "group/spread.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;

/// Blocks one behind the other.
std::vector<schedule::Block> in_a_row(const std::vector<Piece>& pieces) {
  std::vector<schedule::Block> blocks;
  for (const Piece& piece : pieces) blocks.push_back({blocks.empty() ? 0 : blocks.back().end(), piece.bytes});
  return blocks;
}

/// A step of the host's ranks, as an operation of theirs alone: send and recv have a piece for each seat.
Operation step_of(const Operation& o, const Terms& terms, Collective collective, size_t seats) {
  Operation step;
  step.collective = collective, step.dtype = o.dtype, step.number = o.number, step.timeout = o.timeout;
  step.op = terms.inside, step.factor = terms.factor;
  step.send = Pieces(seats), step.recv = Pieces(seats);
  return step;
}

/// For the fingerprint, by which ranks compare what they do: elements of all pieces.
size_t elements_of(const Pieces& pieces, size_t width) {
  size_t bytes = 0;
  for (size_t s = 0; s < pieces.size(); ++s) bytes += pieces[s].bytes;
  return bytes / width;
}

}  // namespace

/// While a slice is between hosts, the next ones come to host memory, and the last one goes back. A kernel that waits
/// holds its device, so none begins before all ranks have called the same.
Status Spread::run_relay(Call& call, size_t slices, const Relay::Room& room, const RelaySteps& steps) {
  Relay& relay = *call.o.relay;
  NVX_TRY(barrier(call));
  NVX_TRY(relay.begin(room));
  const auto last = std::ptrdiff_t(slices);
  for (std::ptrdiff_t k = 0; k < last + std::ptrdiff_t(Relay::kSlots) - 1; ++k) {
    const std::ptrdiff_t there = k - std::ptrdiff_t(Relay::kAhead), done = there - std::ptrdiff_t(kSlicesInFlight);
    if (k < last) NVX_TRY(steps.set_out(size_t(k)));
    if (there >= 0 && there < last) {
      NVX_TRY(relay.arrive(size_t(there), call.rules.deadline, [this] { drive(); }));
      if (carries()) steps.go_between(size_t(there));
    }
    if (done < 0) continue;
    if (carries()) NVX_TRY(finish(call));
    NVX_TRY(steps.come_home(size_t(done)));
  }
  return relay.end();
}

/// The same slices, parts and sums as of all_reduce_on_rails.
Status Spread::all_reduce_by_relay(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  Relay& relay = *o.relay;
  const size_t bytes = o.count * call.width, slice = bridge.slice / call.width * call.width;
  const auto part = [&](const std::byte* of, size_t k, size_t s) {
    return part_of({const_cast<std::byte*>(of), bytes}, slice, k, s, call.width);
  };
  const auto count = [&](size_t k) { return std::min(slice, bytes - k * slice) / call.width; };
  const auto set_out = [&](size_t k) {
    Operation sum = step_of(o, call.terms, bridge.before, seats());
    sum.count = count(k);
    for (size_t s = 0; s < seats(); ++s) sum.send[s] = part(o.in, k, s);
    const Piece mine = part(o.out, k, seat());
    sum.out = mine.data;
    return relay.set_out(k, {&sum, 1}, {mine});
  };
  const auto go_between = [&](size_t k) {
    Active& active = prepare(call, bridge.row, rail(seat()));
    active.errand.layout.bytes = part(o.out, k, seat()).bytes;
    active.errand.input = active.errand.output = relay.at(k);
    begin(call, active);
  };
  const auto come_home = [&](size_t k) {
    Operation tell = step_of(o, call.terms, bridge.after, seats());
    tell.count = count(k);
    for (size_t s = 0; s < seats(); ++s) tell.recv[s] = part(o.out, k, s);
    const Relay::Haul mine{tell.recv[seat()]};
    tell.in = mine.there.data;
    divide(call, relay.at(k), mine.there.bytes);
    return relay.come_home(k, {&mine, 1}, {&tell, 1});
  };
  const size_t slices = (bytes + slice - 1) / slice, longest = part(o.out, 0, seat()).bytes;
  return run_relay(call, slices, {.host = longest}, {set_out, go_between, come_home});
}

/// For every host the sum of a block there is made among the ranks of this host, in memory of the device, and only
/// these sums come to host memory, where the rail sums them over hosts; only this rank's own result goes back.
Status Spread::reduce_scatter_by_relay(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  Relay& relay = *o.relay;
  const size_t hosts = group_.topology().hosts.size(), longest = o.send.longest();
  const size_t slice = relay_slice(bridge, group_.plan_facts()) / call.width * call.width;
  const Cut cut{slice, (longest + slice - 1) / slice, longest};
  const auto terms = [&](size_t k) {
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(slice_of(o.send, cut, k, host, 0, seat()));
    return in_a_row(pieces);
  };
  const auto set_out = [&](size_t k) {
    const std::vector<schedule::Block> blocks = terms(k);
    std::vector<Operation> sums;
    for (size_t host = 0; host < hosts; ++host) {
      Operation sum = step_of(o, call.terms, bridge.before, seats());
      for (size_t s = 0; s < seats(); ++s) sum.send[s] = slice_of(o.send, cut, k, host, 0, s);
      sum.count = elements_of(sum.send, call.width);
      sum.out = relay.scratch(k) + blocks[host].offset;
      if (sum.count != 0) sums.push_back(std::move(sum));
    }
    return relay.set_out(k, sums, {Piece{relay.scratch(k), blocks.back().end()}});
  };
  const auto go_between = [&](size_t k) {
    Active& active = prepare(call, bridge.row, rail(seat()));
    active.blocks = terms(k);
    active.errand.input = relay.at(k);
    active.errand.output = relay.at(k) + active.blocks.back().end();
    begin(call, active);
  };
  const auto come_home = [&](size_t k) {
    const Relay::Haul mine{cut.of({o.out, o.send[size_t(group_.rank())].bytes}, k), terms(k).back().end()};
    divide(call, relay.at(k) + mine.at, mine.there.bytes);
    return relay.come_home(k, {&mine, 1}, {});
  };
  const size_t most = std::min(slice, longest);
  return run_relay(call, cut.chunks, {.host = (hosts + 1) * most, .device = hosts * most},
                   {set_out, go_between, come_home});
}

/// This rank's own block comes to host memory, where the rail gathers those of its seat on all hosts. These go back to
/// the device, and the ranks of the host hand each other what they have, for every host.
Status Spread::all_gather_by_relay(Call& call, const Bridge& bridge) {
  Operation& o = call.o;
  Relay& relay = *o.relay;
  const size_t hosts = group_.topology().hosts.size(), longest = o.recv.longest();
  const size_t slice = relay_slice(bridge, group_.plan_facts()) / call.width * call.width;
  const Cut cut{slice, (longest + slice - 1) / slice, longest};
  const auto own = [&](size_t k) {
    return cut.of({const_cast<std::byte*>(o.in), o.recv[size_t(group_.rank())].bytes}, k);
  };
  const auto pieces_of_rail = [&](size_t k) {
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(slice_of(o.recv, cut, k, host, 0, seat()));
    return pieces;
  };
  const auto set_out = [&](size_t k) {
    return relay.set_out(k, {}, {own(k), in_a_row(pieces_of_rail(k))[host_].offset});
  };
  const auto go_between = [&](size_t k) {
    Active& active = prepare(call, bridge.row, rail(seat()));
    active.blocks = in_a_row(pieces_of_rail(k));
    active.errand.input = relay.at(k) + active.blocks[host_].offset;
    active.errand.output = relay.at(k);
    begin(call, active);
  };
  const auto come_home = [&](size_t k) {
    const std::vector<Piece> pieces = pieces_of_rail(k);
    const std::vector<schedule::Block> blocks = in_a_row(pieces);
    std::vector<Relay::Haul> up;
    std::vector<Operation> tells;
    for (size_t host = 0; host < hosts; ++host) {
      if (host != host_) up.push_back({pieces[host], blocks[host].offset});
      Operation tell = step_of(o, call.terms, bridge.after, seats());
      for (size_t s = 0; s < seats(); ++s) tell.recv[s] = slice_of(o.recv, cut, k, host, 0, s);
      tell.count = elements_of(tell.recv, call.width);
      tell.in = host == host_ ? own(k).data : pieces[host].data;
      if (tell.count != 0) tells.push_back(std::move(tell));
    }
    return relay.come_home(k, up, tells);
  };
  return run_relay(call, cut.chunks, {.host = hosts * std::min(slice, longest)}, {set_out, go_between, come_home});
}

}  // namespace nvx
