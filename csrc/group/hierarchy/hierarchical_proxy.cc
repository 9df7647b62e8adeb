// Drives the slices of collectives on device data: a proxy performs the steps inside each host, in rounds of kernels.

#include <iterator>

#include "group/hierarchy/hierarchical.h"
#include "group/hierarchy/host_proxy.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;

Operation moves(const Operation& o, const std::vector<CopyPair>& copies, Piece CopyPair::*from, Piece CopyPair::*to) {
  Operation step;
  step.number = o.number, step.timeout = o.timeout;
  step.send = Pieces(copies.size()), step.recv = Pieces(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) step.send[i] = copies[i].*from, step.recv[i] = copies[i].*to;
  return step;
}
Operation d2h(const Operation& o, const std::vector<CopyPair>& copies) {
  return moves(o, copies, &CopyPair::device, &CopyPair::host);
}
Operation h2d(const Operation& o, const std::vector<CopyPair>& copies) {
  return moves(o, copies, &CopyPair::host, &CopyPair::device);
}

Operation awaiting(Operation moves, HostProxy& proxy, Stamp what) {
  moves.awaited = proxy.host_counter(), moves.awaits = what;
  return moves;
}

void append(std::vector<Operation>& round, std::vector<Operation> steps) {
  std::erase_if(steps, [](const Operation& step) { return step.count == 0; });
  std::ranges::move(steps, std::back_inserter(round));
}

size_t rounds_of(const Slices& slices) { return slices.count() + HostProxy::kRounds + 1; }

}  // namespace

Status Hierarchical::reserve_slots(const Operation& o) const {
  const std::unique_ptr<Slices> slices = this->slices(o);
  return o.proxy->make({slices->count(), rounds_of(*slices), slices->slot_bytes(), slices->moves_only()});
}

/// Round r overlaps three stages: device to host for slice r, host to device for slice r - kRounds, and the exchange
/// inside the host for the slice before that. This uses both directions of the bus and the links between devices at the
/// same time. A copy concerns one rank alone; errors in it name the whole operation.
///
/// A kernel that waits for peers blocks its device, so the first round waits until all ranks have made the same call.
Status Hierarchical::launch(const Operation& o) const {
  const std::unique_ptr<Slices> slices = this->slices(o);
  const Whole whole{o.fingerprint(), {}, 0};
  HostProxy& proxy = *o.proxy;
  for (size_t r = 0; r < rounds_of(*slices); ++r) {
    std::vector<Operation> round;
    if (r == 0 && slices->by_kernels()) round.push_back(awaiting(d2h(o, {}), proxy, HostProxy::kAllArrived));
    if (r < slices->count()) {
      append(round, slices->before(r));
      if (const auto copies = slices->d2h(r)) round.push_back(d2h(o, *copies));
    }
    if (r > HostProxy::kRounds) append(round, slices->after(r - HostProxy::kRounds - 1));
    if (const size_t k = r - HostProxy::kRounds; r >= HostProxy::kRounds && k < slices->count())
      round.push_back(awaiting(h2d(o, slices->h2d(k)), proxy, HostProxy::may_copy_back(k)));
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
  const std::unique_ptr<Slices> slices = this->slices(call.o);
  const Deadline& deadline = call.rules.deadline;
  if (slices->by_kernels()) NVX_TRY(barrier(call));
  proxy.signal(HostProxy::kAllArrived);
  const auto issue = [&](size_t k) -> Status {
    NVX_TRY(proxy.await(k, deadline, [this] { drive(); }));
    auto chunk = slices->chunk(k);
    return chunk ? perform_chunk(call, *std::move(chunk), slices->bytes()) : Status();
  };
  const auto retire = [&](size_t k) -> Status {
    proxy.signal(HostProxy::may_copy_back(k));
    return {};
  };
  NVX_TRY(overlap(call, *slices, slices->by_kernels() ? kSlicesInFlight : 0, issue, retire));
  return proxy.await_all(deadline);
}

/// Performs a chunk of the call's operation in host memory. `bytes`: see `Whole`.
Status Hierarchical::perform_chunk(Call& call, Operation chunk, size_t bytes) {
  const Whole whole{call.o.fingerprint(), call.rules.deadline, bytes};
  chunk.number = call.o.number, chunk.whole = &whole;
  Call of_chunk{chunk, call.rules, call.fingerprint, call.split, call.combine, call.runs};
  const Status status = perform(of_chunk);
  call.runs = of_chunk.runs;
  return status;
}

}  // namespace nvx
