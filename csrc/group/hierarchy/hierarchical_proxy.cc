// Collectives over several hosts on device data: a proxy performs the steps inside each host. The sums, and so the
// bits, are those of `hierarchical_reduce.cc`.

#include <algorithm>

#include "group/hierarchy/hierarchical.h"
#include "group/hierarchy/host_proxy.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;

/// Adjacent blocks, in order.
std::vector<schedule::Block> in_a_row(const std::vector<Piece>& pieces) {
  std::vector<schedule::Block> blocks;
  for (const Piece& piece : pieces) blocks.push_back({blocks.empty() ? 0 : blocks.back().end(), piece.bytes});
  return blocks;
}

/// A step of the ranks of this host, as an operation of its own: `send` and `recv` have a piece for each `local_rank`.
Operation step_of(const Operation& o, Collective collective, size_t local_ranks) {
  Operation step;
  step.collective = collective, step.dtype = o.dtype, step.number = o.number, step.timeout = o.timeout;
  step.send = Pieces(local_ranks), step.recv = Pieces(local_ranks);
  return step;
}

/// The same for a step that combines, with the operator of the terms.
Operation sum_of(const Operation& o, const Terms& terms, Collective collective, size_t local_ranks) {
  Operation step = step_of(o, collective, local_ranks);
  step.op = terms.inside, step.factor = terms.factor;
  return step;
}

/// Copies between host memory and the device.
Operation moves(const Operation& o, const std::vector<CopyPair>& copies, Piece CopyPair::*from, Piece CopyPair::*to) {
  Operation step = step_of(o, Collective::kNone, copies.size());
  step.dtype = DType::kBytes;
  for (size_t i = 0; i < copies.size(); ++i) step.send[i] = copies[i].*from, step.recv[i] = copies[i].*to;
  return step;
}
Operation down(const Operation& o, const std::vector<CopyPair>& copies) {
  return moves(o, copies, &CopyPair::device, &CopyPair::host);
}
Operation up(const Operation& o, const std::vector<CopyPair>& copies) {
  return moves(o, copies, &CopyPair::host, &CopyPair::device);
}
CopyPair between(const Piece& device, std::byte* host) { return {device, {host, device.bytes}}; }

/// Copies that wait for a message of the host.
Operation awaiting(Operation moves, HostProxy& proxy, Stamp what) {
  moves.awaited = proxy.said(), moves.awaits = what;
  return moves;
}

std::vector<Operation> alone(Operation step) {
  std::vector<Operation> steps;
  steps.push_back(std::move(step));
  return steps;
}

void append(std::vector<Operation>& steps, std::vector<Operation> more) {
  std::move(more.begin(), more.end(), std::back_inserter(steps));
}

/// The number of elements of all pieces, for the fingerprint.
size_t elements_of(const Pieces& pieces, size_t width) {
  size_t bytes = 0;
  for (size_t s = 0; s < pieces.size(); ++s) bytes += pieces[s].bytes;
  return bytes / width;
}

}  // namespace

Status Hierarchical::make_room(const Operation& o) const {
  const StagingPipeline way = pipeline(o);
  return o.proxy->make({way.slices, rounds_of(way), way.room});
}

/// Round r overlaps three stages: device to host for slice r, host to device for slice r - kRounds, and the exchange
/// inside the host for the slice before that. This uses both directions of the bus and the links between devices at the
/// same time. A copy concerns one rank alone; errors in it name the whole operation.
Status Hierarchical::launch(const Operation& o) const {
  const StagingPipeline way = pipeline(o);
  const Whole whole{o.fingerprint(), {}, 0};
  HostProxy& proxy = *o.proxy;
  for (size_t r = 0; r < rounds_of(way); ++r) {
    std::vector<Operation> round;
    if (r == 0 && way.meets_first) round.push_back(awaiting(down(o, {}), proxy, HostProxy::kMet));
    if (r < way.slices) append(round, way.bring(r));
    if (way.hand_out && r > HostProxy::kRounds) append(round, way.hand_out(r - HostProxy::kRounds - 1));
    if (const size_t k = r - HostProxy::kRounds; r >= HostProxy::kRounds && k < way.slices) {
      round.push_back(awaiting(way.take_back(k), proxy, HostProxy::may_go(k)));
    }
    for (Operation& step : round) {
      if (step.collective == Collective::kNone) step.whole = &whole;
    }
    NVX_TRY(proxy.begin_round(round));
  }
  return {};
}

/// While slices are between hosts, later ones are copied to host memory, and earlier ones back.
Status Hierarchical::run_proxy(Call& call) {
  HostProxy& proxy = *call.o.proxy;
  const StagingPipeline way = pipeline(call.o);
  const Deadline& deadline = call.rules.deadline;
  if (way.meets_first) NVX_TRY(barrier(call));
  proxy.say(HostProxy::kMet);
  for (size_t k = 0; k < way.slices + way.lag; ++k) {
    if (k < way.slices) {
      NVX_TRY(proxy.await(k, deadline, [this] { drive(); }));
      if (way.carries) way.args(*this, call, k);
      if (way.perform) NVX_TRY(way.perform(*this, call, k));
    }
    if (k < way.lag) continue;
    const size_t done = k - way.lag;
    if (way.carries) NVX_TRY(finish(call));
    const Piece sum = way.result ? way.result(done) : Piece{};
    divide(call, sum.data, sum.bytes);
    proxy.say(HostProxy::may_go(done));
  }
  return proxy.see_end(deadline);
}

size_t Hierarchical::rounds_of(const StagingPipeline& way) { return way.slices + HostProxy::kRounds + 1; }

Hierarchical::StagingPipeline Hierarchical::pipeline(const Operation& o) const {
  if (why_not_by_kernels(o.collective, o.dtype, o.count, members_.facts)) return way_by_the_host(o);
  switch (o.collective) {
    case Collective::kAllReduce: return way_of_all_reduce(o);
    case Collective::kReduceScatter: return way_of_reduce_scatter(o);
    default: return way_of_all_gather(o);
  }
}

/// A kernel that waits for peers blocks its device, so the first round waits until all ranks have made the same call.
Hierarchical::StagingPipeline Hierarchical::way_of_kernels(bool carries) {
  StagingPipeline way;
  way.meets_first = true;
  way.lag = kSlicesInFlight;
  way.carries = carries;
  return way;
}

/// The host combines and distributes; on the device each rank only copies its own data.
Hierarchical::StagingPipeline Hierarchical::way_by_the_host(const Operation& o) const {
  const bool in_chunks = goes_in_chunks(o.collective, o.dtype, o.count);
  const Cut cut = in_chunks ? nvx::cut(o, members_.facts) : uncut(o);
  const auto staged = [=, this, &o](size_t k) { return land(o, cut, k, members_.rank, o.proxy->at(k)); };
  StagingPipeline way;
  way.slices = cut.chunks;
  way.room = room_for(o, cut, members_.rank);
  way.bring = [=, &o](size_t k) { return alone(down(o, staged(k).down)); };
  way.perform = [=](Hierarchical& self, Call& call, size_t k) {
    StagedChunk there = staged(k);
    const Whole whole{call.o.fingerprint(), call.rules.deadline, cut.bytes};
    there.part.number = call.o.number, there.part.whole = &whole;
    return self.perform(call, there.part);
  };
  way.take_back = [=, &o](size_t k) { return up(o, staged(k).up); };
  return way;
}

/// Uses the same slices, parts and sums as `all_reduce_on_rails()`. The kernel writes a rank's sum directly to host
/// memory.
Hierarchical::StagingPipeline Hierarchical::way_of_all_reduce(const Operation& o) const {
  const InterHostPlan inter_host = inter_host_plan(o);
  if (inter_host.by_leader) return way_of_small_all_reduce(o, inter_host);
  const Terms terms = terms_here(o);
  const size_t width = size_of(o.dtype), bytes = o.count * width, slice = inter_host.slice / width * width;
  const auto part = [=, this](const std::byte* of, size_t k, size_t s) {
    return part_of({const_cast<std::byte*>(of), bytes}, slice, k, s, width);
  };
  const auto count = [=](size_t k) { return std::min(slice, bytes - k * slice) / width; };
  StagingPipeline way = way_of_kernels(carries());
  way.slices = (bytes + slice - 1) / slice;
  way.room = part(o.out, 0, local_rank()).bytes;
  way.bring = [=, this, &o](size_t k) {
    Operation sum = sum_of(o, terms, inter_host.before, local_ranks());
    sum.count = count(k);
    for (size_t s = 0; s < local_ranks(); ++s) sum.send[s] = part(o.in, k, s);
    sum.out = o.proxy->at(k);
    return alone(std::move(sum));
  };
  way.args = [=, &o](Hierarchical& self, Call& call, size_t k) {
    Active& active = self.prepare(call, inter_host.row, self.rail(self.local_rank()));
    active.args.layout.bytes = part(o.out, k, self.local_rank()).bytes;
    active.args.input = active.args.output = o.proxy->at(k);
    self.begin(call, active);
  };
  way.result = [=, this, &o](size_t k) { return Piece{o.proxy->at(k), part(o.out, k, local_rank()).bytes}; };
  way.take_back = [=, this, &o](size_t k) { return up(o, {between(part(o.out, k, local_rank()), o.proxy->at(k))}); };
  way.hand_out = [=, this, &o](size_t k) {
    Operation tell = step_of(o, inter_host.after, local_ranks());
    tell.count = count(k);
    for (size_t s = 0; s < local_ranks(); ++s) tell.recv[s] = part(o.out, k, s);
    tell.in = tell.recv[local_rank()].data;
    return alone(std::move(tell));
  };
  return way;
}

/// Like `all_reduce_by_leader()`: one rank of each host copies the sum to host memory, and broadcasts the result.
Hierarchical::StagingPipeline Hierarchical::way_of_small_all_reduce(const Operation& o,
                                                                    const InterHostPlan& inter_host) const {
  const Terms terms = terms_here(o);
  const size_t bytes = o.count * size_of(o.dtype);
  const bool leads = local_rank() == 0;
  const Piece whole{o.out, bytes}, own{o.out, leads ? bytes : 0};
  StagingPipeline way = way_of_kernels(leads);
  way.slices = 1;
  way.room = own.bytes;
  way.bring = [=, this, &o](size_t k) {
    Operation sum = sum_of(o, terms, inter_host.before, local_ranks());
    sum.root = 0, sum.count = o.count, sum.in = o.in;
    sum.out = leads ? o.proxy->at(k) : nullptr;
    return alone(std::move(sum));
  };
  way.args = [=, &o](Hierarchical& self, Call& call, size_t k) {
    Active& active = self.prepare(call, inter_host.row, self.leaders());
    active.args.layout.bytes = bytes;
    active.args.input = active.args.output = o.proxy->at(k);
    self.begin(call, active);
  };
  way.result = [=, &o](size_t k) { return Piece{o.proxy->at(k), own.bytes}; };
  way.take_back = [=, &o](size_t k) { return up(o, {between(own, o.proxy->at(k))}); };
  way.hand_out = [=, this, &o](size_t) {
    Operation tell = step_of(o, inter_host.after, local_ranks());
    tell.root = 0, tell.count = o.count, tell.in = o.out, tell.out = o.out;
    for (size_t s = 0; s < local_ranks(); ++s) tell.recv[s] = whole;
    return alone(std::move(tell));
  };
  return way;
}

/// The ranks of this host sum a block for every host. Only these sums are copied to host memory, where the rail sums
/// them over hosts. Only this rank's result is copied back.
Hierarchical::StagingPipeline Hierarchical::way_of_reduce_scatter(const Operation& o) const {
  const InterHostPlan inter_host = inter_host_plan(o);
  const Terms terms = terms_here(o);
  const size_t hosts = members_.topology.hosts.size(), width = size_of(o.dtype), longest = o.send.longest();
  const size_t slice = proxy_slice(inter_host, members_.facts) / width * width;
  const Cut cut{slice, (longest + slice - 1) / slice, longest};
  const auto blocks_of = [=, this, &o](size_t k) {
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(slice_of(o.send, cut, k, host, 0, local_rank()));
    return in_a_row(pieces);
  };
  const auto own = [=, this, &o](size_t k) { return cut.of({o.out, o.send[size_t(members_.rank)].bytes}, k); };
  StagingPipeline way = way_of_kernels(carries());
  way.slices = cut.chunks;
  way.room = (hosts + 1) * std::min(slice, longest);
  way.bring = [=, this, &o](size_t k) {
    const std::vector<schedule::Block> blocks = blocks_of(k);
    std::vector<Operation> sums;
    for (size_t host = 0; host < hosts; ++host) {
      Operation sum = sum_of(o, terms, inter_host.before, local_ranks());
      for (size_t s = 0; s < local_ranks(); ++s) sum.send[s] = slice_of(o.send, cut, k, host, 0, s);
      sum.count = elements_of(sum.send, width);
      sum.out = o.proxy->at(k) + blocks[host].offset;
      if (sum.count != 0) sums.push_back(std::move(sum));
    }
    return sums;
  };
  way.args = [=, &o](Hierarchical& self, Call& call, size_t k) {
    Active& active = self.prepare(call, inter_host.row, self.rail(self.local_rank()));
    active.blocks = blocks_of(k);
    active.args.input = o.proxy->at(k);
    active.args.output = o.proxy->at(k) + active.blocks.back().end();
    self.begin(call, active);
  };
  const auto result = [=, &o](size_t k) { return Piece{o.proxy->at(k) + blocks_of(k).back().end(), own(k).bytes}; };
  way.result = result;
  way.take_back = [=, &o](size_t k) { return up(o, {between(own(k), result(k).data)}); };
  return way;
}

/// This rank's block is copied to host memory, where the rail gathers the blocks of its `local_rank` on all hosts.
/// These are copied back to the device, and the ranks of the host exchange them.
Hierarchical::StagingPipeline Hierarchical::way_of_all_gather(const Operation& o) const {
  const InterHostPlan inter_host = inter_host_plan(o);
  const size_t hosts = members_.topology.hosts.size(), width = size_of(o.dtype), longest = o.recv.longest();
  const size_t slice = proxy_slice(inter_host, members_.facts) / width * width;
  const Cut cut{slice, (longest + slice - 1) / slice, longest};
  const auto own = [=, this, &o](size_t k) {
    return cut.of({const_cast<std::byte*>(o.in), o.recv[size_t(members_.rank)].bytes}, k);
  };
  const auto pieces_of_rail = [=, this, &o](size_t k) {
    std::vector<Piece> pieces;
    for (size_t host = 0; host < hosts; ++host) pieces.push_back(slice_of(o.recv, cut, k, host, 0, local_rank()));
    return pieces;
  };
  StagingPipeline way = way_of_kernels(carries());
  way.slices = cut.chunks;
  way.room = hosts * std::min(slice, longest);
  way.bring = [=, this, &o](size_t k) {
    return alone(down(o, {between(own(k), o.proxy->at(k) + in_a_row(pieces_of_rail(k))[host_].offset)}));
  };
  way.args = [=, &o](Hierarchical& self, Call& call, size_t k) {
    Active& active = self.prepare(call, inter_host.row, self.rail(self.local_rank()));
    active.blocks = in_a_row(pieces_of_rail(k));
    active.args.input = o.proxy->at(k) + active.blocks[self.host_].offset;
    active.args.output = o.proxy->at(k);
    self.begin(call, active);
  };
  way.take_back = [=, this, &o](size_t k) {
    const std::vector<Piece> pieces = pieces_of_rail(k);
    const std::vector<schedule::Block> blocks = in_a_row(pieces);
    std::vector<CopyPair> copies;
    for (size_t host = 0; host < hosts; ++host) {
      if (host != host_) copies.push_back(between(pieces[host], o.proxy->at(k) + blocks[host].offset));
    }
    return up(o, copies);
  };
  way.hand_out = [=, this, &o](size_t k) {
    std::vector<Operation> tells;
    for (size_t host = 0; host < hosts; ++host) {
      Operation tell = step_of(o, inter_host.after, local_ranks());
      for (size_t s = 0; s < local_ranks(); ++s) tell.recv[s] = slice_of(o.recv, cut, k, host, 0, s);
      tell.count = elements_of(tell.recv, width);
      tell.in = host == host_ ? own(k).data : tell.recv[local_rank()].data;
      if (tell.count != 0) tells.push_back(std::move(tell));
    }
    return tells;
  };
  return way;
}

}  // namespace nvx
