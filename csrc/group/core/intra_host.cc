#include "group/core/intra_host.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "base/round_up.h"
#include "base/text.h"
#include "kernel/cpu/run_on_cpu.h"
#include "kernel/reduce/level.h"

namespace nvx {

using kernel::Collective;
using kernel::Piece;

IntraHost::IntraHost(Core& core)
    : core_(core),
      members_(core.members),
      channel_(members_.local_rank(), members_.memory, members_.first_epoch,
               /*rotates=*/rotation(members_.facts) != 0) {
  core_.shm().leases().join(this);
}

IntraHost::~IntraHost() {
  LeasePool& leases = core_.shm().leases();
  leases.leave(this);
  MutexLock lock(lease_mutex_);
  if (lease_) leases.free_when(lease_, members_.all_peers_gone());
}

kernel::CollectiveArgs IntraHost::args_of(const Operation& step, const Operation& call, size_t staged) const {
  kernel::CollectiveArgs args = step.args_of({call.fingerprint(), step.factor, step.root});
  args.bytes = staged;
  if (step.collective == Collective::kGather) args.meets_all = step.root == members_.local_rank();
  if (step.collective == Collective::kScatter) {
    args.meets_all = false;
    if (step.root != members_.local_rank()) args.meets = step.root;
  }
  return args;
}

Status IntraHost::run(const Operation& step, const Operation& o, const WaitRules& rules) {
  const size_t staged = staged_bytes(step);
  const Choice choice = plan(step.collective, staged, members_.facts);
  const bool only_reads = step.collective == Collective::kBroadcast && step.root != members_.local_rank();
  const bool gives = choice.lease_bytes != 0 && !only_reads;
  const std::optional<size_t> lends = gives ? lendable(step) : std::nullopt;
  const bool leases = gives && !lends;
  if (lends) channel_.lend(*lends, choice.lease_bytes);
  if (leases) {
    try {
      hold_lease(choice.lease_bytes);
    } catch (const Error& error) {
      return core_.failures.fail(error.failure());  // the others would wait for this rank until their timeout
    }
    const Span part = next_part(choice, staged);
    channel_.lease(part.offset, part.bytes);
  }
  core_.status->runs(choice.algorithm);
  NVX_LOG(kTrace, "group %s rank %d #%llu %s %zu bytes: %s", members_.name.c_str(), members_.rank,
          static_cast<unsigned long long>(o.number), nvx::name(step.collective), staged,
          kernel::name(choice.algorithm));
  const kernel::ReduceFn reduce = reduces(step.collective) ? kernel::level().reduce(o.dtype, step.op) : nullptr;
  // kPremulSum: each rank announces its own factor with its arrival.
  if (step.op == ReduceOp::kPremulSum) std::fill(channel_.factors().begin(), channel_.factors().end(), step.factor);
  kernel::CpuExec ex(size_of(o.dtype), reduce, channel_.factors().data(), rules);
  // The root of a gather and the receivers of a scatter stage nothing, so use their first non-empty receive piece.
  size_t kept = staged;
  for (size_t s = 0; kept == 0 && s < step.recv.size(); ++s) kept = step.recv[s].bytes;
  ex.keep_by(policy_to_keep(kept, members_.facts));
  Status status;
  try {
    if (!kernel::run_on_cpu(choice.algorithm, ex, channel_, args_of(step, o, staged)))
      status = explain(ex.verdict(), o, rules.deadline);
  } catch (const Error& error) {  // the memory of a peer's tensors cannot be mapped
    status = core_.failures.fail(error.failure());
  }
  if (leases) {
    MutexLock lock(lease_mutex_);
    lease_in_use_ = false;
  }
  if (lends) channel_.lease(0, 0);
  return status;
}

// --- the lease

/// The most that one rank puts into its slot, or stages in total.
size_t IntraHost::staged_bytes(const Operation& step) const {
  size_t bytes = 0;
  switch (step.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: return step.count * size_of(step.dtype);
    case Collective::kAllGather:
    case Collective::kBroadcast: return step.recv.longest();
    case Collective::kReduceScatter: return step.send.longest() * step.send.size();
    default:
      for (size_t s = 0; s < step.send.size(); ++s) bytes += int(s) == members_.local_rank() ? 0 : step.send[s].bytes;
      return bytes;
  }
}

/// The place of the data that this rank gives in its process's `TensorMemory`, if it can lend the data: the operation
/// writes to none of it that peers may still read. A broadcast's root stages while the others copy, which is faster
/// than a root that only waits.
std::optional<size_t> IntraHost::lendable(const Operation& step) const {
  const auto me = size_t(members_.local_rank());
  Piece given = piece_of(step.in, 0);
  bool writes_apart = true;
  switch (step.collective) {
    case Collective::kAllReduce:
      given.bytes = step.count * size_of(step.dtype);
      writes_apart = step.in == step.out;
      break;
    case Collective::kAllGather:
      given.bytes = step.recv[me].bytes;
      for (size_t p = 0; p < step.recv.size(); ++p) {
        const bool own = step.recv[p].data == given.data && p == me;
        writes_apart &= own || apart(step.recv[p], given);
      }
      break;
    case Collective::kReduceScatter:
    case Collective::kAllToAll: {
      const std::optional<Piece> all = step.send.whole();
      if (!all) return std::nullopt;
      given = *all;
      const bool own = step.out == step.send[me].data;
      if (step.collective == Collective::kReduceScatter)
        writes_apart = own || apart({step.out, step.send[me].bytes}, given);
      for (const Piece& piece : step.recv) writes_apart &= apart(piece, given);
      break;
    }
    default: return std::nullopt;
  }
  return writes_apart ? core_.shm().tensors().find(given.data, given.bytes) : std::nullopt;
}

/// A lease that is too small is replaced once no peer reads it. Until then the smaller one remains in use.
void IntraHost::hold_lease(size_t bytes) {
  MutexLock lock(lease_mutex_);
  lease_in_use_ = true;
  const bool fits = std::max(lease_wanted_, lease_.bytes) >= bytes;
  if (lease_ && (fits || !read_by_all(channel_.leased_epoch()))) return;
  const Span old = std::exchange(lease_, Span{});
  lease_wanted_ = bytes;
  lock.unlock();  // the pool may reclaim leases of other groups, and their threads those of this one
  LeasePool& leases = core_.shm().leases();
  if (old) leases.release(old);
  const Span span = leases.acquire(std::max(bytes, rotation(members_.facts)), bytes, this);
  lock.lock();
  lease_ = span;
  lease_at_ = 0;
}

/// The staging of an operation: the next part of the lease, in rotation. See rotation() in group/plan/plan.h.
Span IntraHost::next_part(const Choice& choice, size_t staged) {
  constexpr size_t kPage = 4096, kLine = 64;  // every part of a chunk begins on a cache line
  size_t bytes = choice.lease_bytes;
  if (choice.algorithm != kernel::Algorithm::kExchange)
    bytes = std::min(bytes, round_up(staged + kLine * members_.facts.ranks, kPage));
  MutexLock lock(lease_mutex_);
  bytes = std::min(bytes, lease_.bytes);
  if (lease_at_ + bytes > std::min(lease_.bytes, std::max(bytes, rotation(members_.facts)))) lease_at_ = 0;
  return {lease_.offset + std::exchange(lease_at_, round_up(lease_at_ + bytes, kPage)), bytes};
}

bool IntraHost::read_by_all(uint32_t epoch) const {
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank()) continue;
    const Stamp done = members_.pad(s).done().value.load(std::memory_order_seq_cst);
    if (!reached(done, stamp(epoch, 0)) && !members_.gone(s)) return false;
  }
  return true;
}

Span IntraHost::release_idle() {
  MutexLock lock(lease_mutex_);
  if (lease_in_use_ || !lease_ || core_.failures.failed() || !read_by_all(channel_.leased_epoch())) return {};
  return std::exchange(lease_, Span{});
}

// --- failures

Status IntraHost::explain(const kernel::Verdict& v, const Operation& o, const Deadline& deadline) {
  const Diagnosis& diagnosis = core_.diagnosis;
  const std::string what = describe(o.fingerprint()), number = "#" + std::to_string(o.number);
  const std::string context = diagnosis.context(what + " " + number);
  const std::string peer = v.peer >= 0 ? members_.describe_local_rank(v.peer) : "";
  switch (v.cause) {
    case kernel::Verdict::Cause::kMismatch: {
      const uint32_t epoch = mismatch_epoch(v.peer, uint32_t(v.wanted >> 32));
      const std::string where = (epoch == channel_.epoch() ? " at " : " before ") + number;
      const Called mine{diagnosis.self(), members_.own_pad().recent(epoch)};
      const Called theirs{peer, members_.pad(v.peer).recent(epoch)};
      return core_.failures.fail(diagnosis.mismatch(where, describe_difference(mine, theirs), context));
    }
    case kernel::Verdict::Cause::kCounts:
      return core_.failures.fail(diagnosis.counts(" at " + number, what, {peer, v.mine, v.theirs}, context));
    case kernel::Verdict::Cause::kBadLease: return core_.failures.fail(diagnosis.bad_lease(peer, context));
    default: {
      Awaited awaited = missing_ranks();
      if (awaited.ranks.empty() && v.peer >= 0) awaited.ranks = {members_.ranks_of_host()[size_t(v.peer)]};
      return core_.failures.explain_wait(v.how, awaited, what + " " + number, deadline);
    }
  }
}

Awaited IntraHost::missing_ranks() {
  Awaited missing;
  std::vector<std::string> names;
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank()) continue;
    const kernel::Arrival& there = members_.pad(s).arrival(channel_.epoch());
    if (reached(there.flag.value.load(std::memory_order_seq_cst), stamp(channel_.epoch(), 0))) continue;
    missing.ranks.push_back(members_.ranks_of_host()[size_t(s)]);
    names.push_back(members_.describe_progress(s));
  }
  missing.names = joined(names);
  return missing;
}

/// The first epoch, up to a known different one, in which this rank and a peer called different operations, as far as
/// both still have the records. Ranks may not meet in a collective with a root, and find out at a later call. The peer
/// is less than kEpochs ahead of this rank.
uint32_t IntraHost::mismatch_epoch(int local_rank, uint32_t epoch) const {
  const auto alike_before = [&](uint32_t e) {
    return members_.own_pad().recent(e).history == members_.pad(local_rank).recent(e).history;
  };
  for (uint32_t e = epoch; channel_.epoch() - e <= kernel::kEpochs; --e) {
    if (alike_before(e)) return e;
  }
  return epoch;
}

void IntraHost::warn_of_differing_calls() const {
  const auto last_of = [this](int local_rank) {
    return uint32_t(members_.pad(local_rank).done().value.load(std::memory_order_acquire) >> 32);
  };
  const uint32_t own = last_of(members_.local_rank());
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank() || members_.pad(s).header().group != members_.id) continue;
    const uint32_t theirs = last_of(s), both = int32_t(theirs - own) < 0 ? theirs : own;
    if (both == members_.first_epoch) continue;
    const uint32_t parted = mismatch_epoch(s, both);
    const kernel::Fingerprint mine = members_.own_pad().recent(parted), other = members_.pad(s).recent(parted);
    if (std::memcmp(&mine, &other, sizeof mine) == 0) continue;
    if (last_of(s) - parted >= kernel::kRecent - 1) continue;  // the peer may overwrite this record now
    const std::string how =
        describe_difference({core_.diagnosis.self(), mine}, {members_.describe_local_rank(s), other});
    NVX_LOG(kWarn, "%s",
            Status(core_.diagnosis.mismatch(", noticed when this rank left it", how, "")).reason().c_str());
    return;
  }
}

}  // namespace nvx
