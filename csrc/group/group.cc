#include "group/group.h"

#include <algorithm>
#include <csignal>

#include "base/config.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "group/hierarchy/hierarchical.h"
#include "group/meet/store_meeting.h"
#include "group/p2p/mailbox.h"
#include "group/roster.h"
#include "net/group_port.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Presence;

}  // namespace

std::chrono::milliseconds Group::span_of(std::chrono::milliseconds own) const {
  return own.count() > 0 && config().timeout.count() == 0 ? own : timeout();
}

WaitRules Group::rules(std::chrono::milliseconds own, Carrier carrier) {
  WaitRules rules;
  rules.deadline = Deadline::after(span_of(own));
  if (carrier == Carrier::kCaller) {
    rules.patience = patience_.get();
    rules.courtesy = &courtesy_;
  }
  rules.watch = this;
  return rules;
}

WaitRules Group::rules_of(const Operation& operation, Carrier carrier) {
  WaitRules rules = this->rules(operation.timeout, carrier);
  if (operation.whole) rules.deadline = operation.whole->deadline;
  return rules;
}

namespace {

/// A queued synchronous call: the caller waits for it in the lane.
class QueuedCall final : public Task {
 public:
  QueuedCall(Group& group, Operation& operation) : group_(group), operation_(operation) {}
  void perform(Carrier carrier) override { status_ = group_.run(operation_, carrier); }
  const Status& status() const { return status_; }

 private:
  Group& group_;
  Operation& operation_;
  Status status_;
};

}  // namespace

/// A forked child has none of the parent's threads, which may hold the lane for ever: operations go through one of its
/// own, to be refused.
Lane& Group::lane() {
  if (!forked()) return *lane_;
  static const auto refusals = std::make_shared<Lane>();
  return *refusals;
}

Status Group::execute(Operation& operation) {
  if (forked()) return check_alive();
  if (lane_->begin_inline()) {
    if (operation.number == 0) operation.number = next_number();
    Status status = run(operation, Carrier::kCaller);
    lane_->end_inline();
    return status;
  }
  if (lane_->held_here()) return inside_itself();
  if (operation.number == 0) operation.number = next_number();
  const auto call = std::make_shared<QueuedCall>(*this, operation);
  lane_->submit(call);
  lane_->wait(*call, Lane::MayRun::kYes, [this] { return look_for_interrupt(), false; });
  return call->status();
}

Status Group::inside_itself() const {
  return {Code::kInvalid,
          "nvx: this was called on " + topology().describe(rank()) + " inside an operation of group " + name() +
              " that has not ended, as by a signal handler that runs while that waits, and would wait for it in vain",
          "call it when the operation has returned, or abort the group"};
}

size_t Group::staged_bytes(const Operation& o) const {
  const size_t width = size_of(o.dtype);
  size_t bytes = 0;
  switch (o.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: return o.count * width;
    case Collective::kAllGather:
    case Collective::kBroadcast:
      for (size_t r = 0; r < o.recv.size(); ++r) bytes = std::max(bytes, o.recv[r].bytes);
      return bytes;
    case Collective::kReduceScatter:
      for (size_t r = 0; r < o.send.size(); ++r) bytes = std::max(bytes, o.send[r].bytes * o.send.size());
      return bytes;
    default:
      for (size_t r = 0; r < o.send.size(); ++r) bytes += int(r) == rank() ? 0 : o.send[r].bytes;
      return bytes;
  }
}

/// A lease that is too small is changed only when nobody reads the old one any more; a smaller one will do meanwhile.
void Group::hold_lease(size_t bytes) {
  MutexLock lock(lease_mutex_);
  lease_in_use_ = true;
  if (lease_ && (lease_wanted_ >= bytes || !read_by_all(channel_->leased_epoch()))) return;
  const Span old = std::exchange(lease_, Span{});
  lease_wanted_ = bytes;
  lock.unlock();  // the pool may ask other groups for theirs, and they this one
  if (old) neighbours().leases().release(old);
  const Span span = neighbours().leases().acquire(bytes, this);
  lock.lock();
  lease_ = span;
}

void Group::rest_lease() {
  MutexLock lock(lease_mutex_);
  lease_in_use_ = false;
}

bool Group::read_by_all(uint32_t epoch) const {
  for (int s = 0; s < local_ranks(); ++s) {
    if (s != local_rank() && !reached(pad(s).done().value.load(std::memory_order_seq_cst), stamp(epoch, 0)) && !gone(s))
      return false;
  }
  return true;
}

Span Group::yield() {
  MutexLock lock(lease_mutex_);
  if (lease_in_use_ || !lease_ || failed() || !read_by_all(channel_->leased_epoch())) return {};
  return std::exchange(lease_, Span{});
}

bool Group::forked() const { return fork_generation_ != nvx::fork_generation(); }

Status Group::check_alive() const {
  if (forked()) {
    return {
        Code::kInvalid,
        "nvx: this process was forked from rank " + std::to_string(rank()) + "; a group does not cross a fork. " +
            (port_ ? "Start ranks with spawn or forkserver: that one talks to other hosts, over UCX, which does not "
                     "work in a forked child"
                   : "Start ranks with spawn, or init_process_group in the child")};
  }
  if (failed()) return refusal();
  if (closed()) return {Code::kInvalid, "nvx: group " + name() + " has been destroyed"};
  return {};
}

/// Of calls that come after the failure: why, but not what would have helped then.
Status Group::refusal() const {
  Failure first = failure().failure();
  first.cause = "group " + name() + " failed earlier, so this call was not begun: " + first.cause;
  first.advice = "destroy the group and make another one";
  return first;
}

Status Group::came_late(const std::string& what) const {
  return met_in(failure(), "this is " + rank_name(rank()) + ", which came to " + what + " after that");
}

kernel::Fingerprint Operation::fingerprint() const {
  if (whole) return whole->fingerprint;
  const Collective called = meets_for == Collective::kNone ? collective : meets_for;
  return {called, dtype, reduces(called) ? op : ReduceOp::kSum, kernel::Form::kDense, root, count, shape, 0};
}

Status Group::launch(const Operation& o, Begins begins) {
  NVX_TRY(check_alive());
  const Status status = hierarchical_->launch(o);
  if (status.ok() || begins == Begins::kInReplays) return status;
  return fail_begun(status);  // the peers wait for what has not begun here
}

Status Group::make_room(const Operation& o) {
  NVX_TRY(check_alive());
  return hierarchical_->make_room(o);
}

Status Group::fail_begun(const Status& status) {
  if (failed()) return failure();
  Failure failure = status.failure();
  if (failure.code == Code::kInvalid) failure.code = Code::kSystem;
  return fail(failure);
}

Status Group::run(Operation& o, Carrier carrier) {
  Status status = carry_out(o, carrier);
  if (parts_later_) part();
  return status;
}

Status Group::carry_out(Operation& o, Carrier carrier) {
  NVX_TRY(check_alive());
  if (o.number == 0) o.number = next_number();
  if (told()) return came_late(describe(o.fingerprint()) + " #" + std::to_string(o.number));
  if (reduces(o.collective) && !kernel::level().reduce(o.dtype, o.op)) {
    return {Code::kInvalid, std::string("nvx: ") + nvx::name(o.op) + " is not defined for " + nvx::name(o.dtype)};
  }
  try {
    if (hierarchical_) return hierarchical_->run(o, carrier);
    const WaitRules rules = rules_of(o, carrier);
    return run_stage(
        {o.collective, o.root, staged_bytes(o), o.in, o.out, o.count, o.send.data(), o.recv.data(), o.op, o.factor}, o,
        rules);
  } catch (const std::bad_alloc&) {
    return fail({Code::kSystem, topology().describe(rank()) + " has no memory left for " + describe(o.fingerprint())});
  }
}

Status Group::run_stage(const Stage& stage, const Operation& o, const WaitRules& rules) {
  const Choice choice = plan(stage.collective, stage.bytes, plan_facts());
  const bool leases = choice.lease_bytes != 0;
  if (leases) {
    try {
      hold_lease(choice.lease_bytes);
    } catch (const Error& error) {
      return fail(error.failure());  // the others will wait for this rank in vain
    }
    MutexLock lock(lease_mutex_);
    channel_->lease(lease_.offset, lease_.bytes);
  }
  NVX_LOG(kTrace, "group %s rank %d #%llu %s %zu bytes: %s", name().c_str(), rank(),
          static_cast<unsigned long long>(o.number), nvx::name(stage.collective), stage.bytes,
          kernel::name(choice.algorithm));
  const kernel::ReduceFn reduce = reduces(stage.collective) ? kernel::level().reduce(o.dtype, stage.op) : nullptr;
  // Where the ranks have chosen factors of their own, each one's comes with its arrival.
  if (stage.op == ReduceOp::kPremulSum) std::fill(channel_->factors().begin(), channel_->factors().end(), stage.factor);
  kernel::CpuExec ex(size_of(o.dtype), reduce, channel_->factors().data(), rules);
  // The root of a gather and the receivers of a scatter stage nothing, so use their first non-empty receive piece.
  size_t kept = stage.bytes;
  for (int s = 0; kept == 0 && stage.recv && s < local_ranks(); ++s) kept = stage.recv[s].bytes;
  ex.keep_by(policy_to_keep(kept));
  kernel::Work work;
  work.call = {o.fingerprint(), stage.factor, stage.root};
  work.in = stage.in;
  work.out = stage.out;
  work.count = stage.count;
  work.send = stage.send;
  work.recv = stage.recv;
  work.bytes = stage.bytes;
  if (stage.collective == Collective::kGather) work.meets_all = stage.root == local_rank();
  if (stage.collective == Collective::kScatter) {
    work.meets_all = false;
    if (stage.root != local_rank()) work.meets = stage.root;
  }
  const bool ended_well = kernel::launch_cpu(choice.algorithm, ex, *channel_, work);
  if (leases) rest_lease();
  if (ended_well) return {};
  return explain_verdict(ex.verdict(), o, rules.deadline);
}

Awaited Group::missing_ranks() {
  Awaited missing;
  for (int s = 0; s < local_ranks(); ++s) {
    if (s == local_rank()) continue;
    kernel::Arrival& there = pad(s).arrival(channel_->epoch());
    if (reached(there.flag.value.load(std::memory_order_seq_cst), stamp(channel_->epoch(), 0))) continue;
    missing.ranks.push_back(here()[size_t(s)]);
    missing.words += (missing.words.empty() ? "" : ", ") + describe_progress(s);
  }
  return missing;
}

/// A rank of this host, and how far it has come. It may be on its way: what it announced last it does not overwrite
/// before this rank has caught up.
std::string Group::describe_progress(int local_rank) const {
  const kernel::Pad there = pad(local_rank);
  const auto announced = [&](uint32_t e) { return there.arrival(e).flag.value.load(std::memory_order_acquire); };
  uint32_t last = options_.first_epoch;
  for (uint32_t e = 0; e < kernel::kEpochs; ++e) {
    if (!reached(announced(last), announced(e))) last = e;
  }
  const bool stopped = members_.peers[size_t(local_rank)] && members_.peers[size_t(local_rank)]->stopped();
  std::string state = stopped ? ", stopped by a signal or a debugger" : "";
  if (there.header().group == id()) {  // else it uses the pad for something else by now
    const kernel::Fingerprint called = there.arrival(last).fingerprint;
    const bool nothing = called.collective == Collective::kNone;
    state += nothing ? ", no collective in this group yet" : ", last collective: " + describe(called);
  }
  return topology().describe(here()[size_t(local_rank)], state);
}

/// The first epoch, up to one in which they differ, in which this rank and a peer called different things, as far as
/// both still know: around a root ranks may not meet, and learn of it from what they call later. The peer is less than
/// kEpochs ahead of this rank.
uint32_t Group::where_they_parted(int local_rank, uint32_t epoch) const {
  const auto alike_before = [&](uint32_t e) {
    return own_pad().recent(e).history == pad(local_rank).recent(e).history;
  };
  for (uint32_t e = epoch; channel_->epoch() - e <= kernel::kEpochs; --e) {
    if (alike_before(e)) return e;
  }
  return epoch;
}

Status Group::explain_verdict(const kernel::Verdict& v, const Operation& o, const Deadline& deadline) {
  const std::string what = describe(o.fingerprint());
  const std::string number = "#" + std::to_string(o.number);
  const std::string context = "this is " + rank_name(rank()) + " in " + what + " " + number + " of group " + name();
  const std::string peer = v.peer >= 0 ? describe_local_rank(v.peer) : "";
  switch (v.cause) {
    case kernel::Verdict::Cause::kMismatch: {
      const uint32_t epoch = where_they_parted(v.peer, uint32_t(v.wanted >> 32));
      const char* where = epoch == channel_->epoch() ? " at " : " before ";
      const std::string cause =
          "collective mismatch in group " + name() + where + number + ": " +
          contrast({topology().describe(rank()), own_pad().recent(epoch)}, {peer, pad(v.peer).recent(epoch)});
      return fail({.code = Code::kMismatch, .cause = cause, .context = context, .advice = kCallAlike});
    }
    case kernel::Verdict::Cause::kCounts:
      return fail({.code = Code::kMismatch,
                   .cause = "collective mismatch in group " + name() + " at " + number + ": in " + what + " " +
                            topology().describe(rank()) + " expects " + std::to_string(v.mine) + " bytes from " + peer +
                            ", which sends " + std::to_string(v.theirs) + " bytes",
                   .context = context,
                   .advice = kCompareSplits});
    case kernel::Verdict::Cause::kBadLease:
      return fail({Code::kMismatch, peer + " describes staging memory that it cannot have", context});
    default: {
      Awaited whom = missing_ranks();
      if (whom.ranks.empty() && v.peer >= 0) whom.ranks = {here()[size_t(v.peer)]};
      return explain_wait(v.how, whom, what + " " + number, deadline);
    }
  }
}

/// "; rank 3 gives no sign of life for 8.0 s", of a rank of another host that is asked for one.
std::string Group::silence_of(int rank) {
  if (!port_ || local_rank_of(rank) >= 0) return "";
  MutexLock lock(port_->mutex());
  const double span = std::chrono::duration<double>(port_->silence(rank)).count();
  if (span < 1) return "";
  return "; " + rank_name(rank) + " gives no sign of life for " + seconds(span) + port_->unheard(rank);
}

Status Group::explain_wait(Waited how, const Awaited& whom, const std::string& what, const Deadline& deadline) {
  const std::string me = "this is " + rank_name(rank()), waited = seconds(deadline);
  if (how == Waited::kTimedOut && port_ && !failed() && told_in_time()) how = Waited::kAlarmed;
  if (how == Waited::kAlarmed && failed())
    return met_in(failure(), me + " in " + what + " of group " + name() + ", waited " + waited +
                                 (whom.words.empty() ? "" : " for " + whom.words));
  std::string names = whom.words, before;
  if (names.empty()) names = whom.ranks.empty() ? "the peers" : topology().describe(whom.ranks.front());
  for (const int r : whom.ranks) {
    names += silence_of(r);
    if (before.empty()) before = trouble_of(r);
  }
  return fail({.code = Code::kTimeout,
               .cause = "timed out in " + what + " of group " + name() + " after " + waited + ", waiting for " + names,
               .context = me,
               .advice = "look at what these ranks do; is the timeout long enough (init_process_group(timeout=), "
                         "NVX_TIMEOUT_S, nvx.set_timeout)?",
               .before = before,
               .awaited = whom.ranks});
}

/// Whether another rank has failed the group; if so, its words are this group's. Asked before each operation: what a
/// rank has given up, the others must not carry out as if it were whole, where they are late enough to know.
bool Group::told(Clock::duration clarity) {
  if (told_by() < 0 && !(port_ && port_->failed())) [[likely]]
    return false;
  alarm(-1, clarity);
  return failed();
}

/// The same within the time of doubt.
bool Group::told_in_time() {
  const auto end = Clock::now() + doubt_.load(std::memory_order_relaxed);
  do {
    if (told()) return true;
    port_->messenger().nap(std::chrono::milliseconds(1));
    port_->messenger().glance();
  } while (Clock::now() < end);
  return false;
}

/// The first local_rank that has noted a failure, or -1.
int Group::told_by() const {
  for (int s = 0; s < local_ranks(); ++s) {
    if (s != local_rank() && pad(s).header().failure.readable()) return s;
  }
  return -1;
}

Status Group::look_around() {
  if (forked()) return check_alive();
  const bool looks = !closed();  // peers may use their memory again for something else
  if (looks && !failed()) (void)told();
  for (int s = 0; looks && s < local_ranks() && !failed(); ++s) {
    if (s != local_rank() && dead(s) && pad(s).header().presence.load() == kernel::Presence::kHere) fail_as_gone(s);
  }
  return failed() ? failure() : Status();
}

void Group::look_while_waiting(int writer) {
  (void)told();
  if (look_for_interrupt() || failed()) throw Error(failure());
  if (const Status alive = check_alive(); !alive.ok()) throw Error(alive);
  look_for_deaths(options_, writer);
}

bool Group::look_for_interrupt() {
  if (forked() || !stop_wanted()) return false;
  (void)fail({Code::kInterrupted, stop_words() + " on " + topology().describe(rank())});
  return true;
}

bool Group::alarmed(int local_rank) {
  if (failed() || closed() || told_by() >= 0 || (port_ && port_->failed())) return true;
  if (look_for_interrupt()) return true;
  if (local_rank >= 0) return local_rank != this->local_rank() && gone(local_rank);
  // Waiting for any: one that has died may be the one; those that left in good order are missed when all have.
  bool somebody = port_ != nullptr;
  for (int s = 0; s < local_ranks(); ++s) {
    if (s != this->local_rank() && dead(s) && pad(s).header().presence.load() == Presence::kHere) return true;
    somebody |= s == this->local_rank() ? local_ranks() == 1 : !gone(s);
  }
  return !somebody;
}

void Group::alarm(int local_rank, Clock::duration clarity) {
  if (failed()) return;
  if (const auto told = what_is_told()) return fail_as_told(*told, clarity);
  if (closed()) {
    (void)fail({Code::kAborted,
                "group " + name() + " was destroyed on " + topology().describe(rank()) + " with operations in flight"});
    return;
  }
  for (int s = 0; s < local_ranks(); ++s) {
    if (s == this->local_rank() || (local_rank >= 0 && s != local_rank) || !gone(s)) continue;
    fail_as_gone(s);
    return;
  }
}

/// Whether a rank of this host has said why it failed.
bool Group::fail_as_told() {
  const int s = told_by();
  if (s < 0) return false;
  fail_as_told(read_note_of(s), kClarity);
  return true;
}

/// What another rank has failed of, as it says: one of this host, or else of another one.
std::optional<net::GroupPort::Told> Group::what_is_told() const {
  if (const int s = told_by(); s >= 0) return read_note_of(s);
  if (!port_ || !port_->failed()) return std::nullopt;
  MutexLock lock(port_->mutex());
  return port_->told();
}

void Group::await_clarity() const {
  if (failed()) return;
  if (const auto told = what_is_told()) (void)seen_to_end(told->failure, kClarity);
}

net::GroupPort::Told Group::read_note_of(int local_rank) const {
  const int teller = here()[size_t(local_rank)];
  return {teller, read_note(pad(local_rank).header().failure, size()).value_or(unreadable_note(rank_name(teller)))};
}

constexpr char kAfterAStop[] =
    "was this process stopped (a debugger, SIGSTOP), or its host cut off? Destroy the group and make another one";

/// The teller is seldom at fault. This rank may be the one that was waited for, or the one that was taken for dead;
/// then the advice is about it.
void Group::fail_as_told(const net::GroupPort::Told& told, Clock::duration clarity) {
  if (const int s = seen_to_end(told.failure, clarity); s >= 0) return fail_as_gone(s);
  const std::vector<int>& awaited = told.failure.awaited;
  const bool here = std::find(awaited.begin(), awaited.end(), rank()) != awaited.end();
  Failure failure = met_in(told.failure, "told by " + rank_name(told.by));
  failure.advice = told.failure.who == rank() ? kAfterAStop
                   : here ? "see what kept this rank, or allow more time (init_process_group(timeout=), NVX_TIMEOUT_S, "
                            "nvx.set_timeout)"
                          : "see the log of the rank named first";
  (void)fail(std::move(failure));
}

void Group::fail_as_gone(int local_rank) {
  const kernel::PadHeader& header = pad(local_rank).header();
  if (header.group != id() || header.presence.load() == Presence::kLeft) {
    fail_as_left(here()[size_t(local_rank)]);
    return;
  }
  const Ending ending = members_.peers[size_t(local_rank)]->ending();
  const bool killed = ending == Ending{Ending::How::kKilled, SIGKILL};
  const int rank = here()[size_t(local_rank)];
  (void)fail({.code = Code::kPeerDied,
              .cause = describe_local_rank(local_rank) + " has ended" + words_of(ending, " (", ")"),
              .advice = see_log_of(rank_name(rank)) + (killed ? "; killed by the kernel? dmesg | grep -i kill" : ""),
              .before = trouble_of(rank),
              .who = rank,
              .ending = ending});
}

void Group::fail_as_left(int rank) {
  const int local_rank = local_rank_of(rank);
  (void)fail({.code = rank == this->rank() ? Code::kAborted : Code::kPeerLeft,
              .cause = (local_rank >= 0 ? describe_progress(local_rank) : topology().describe(rank)) +
                       " has left group " + name() +
                       ", in which it is still waited for: it has destroyed the group, or its process ends",
              .advice = see_log_of(rank_name(rank)),
              .before = trouble_of(rank),
              .who = rank});
}

Status Group::failure() const {
  if (forked()) return check_alive();
  MutexLock lock(failure_mutex_);
  return failure_;
}

/// For the ranks of this host to read. The first note stays; who has left in good order has nothing to note.
void Group::note_failure(const Failure& failure) {
  kernel::Pad own = own_pad();
  if (own.header().presence.load(std::memory_order_relaxed) == Presence::kLeft) return;
  write_note(own.header().failure, failure);
  for (Flag* flag : {&own.arrival(0).flag, &own.arrival(1).flag, &own.arrival(2).flag, &own.arrival(3).flag,
                     &own.done(), &own.staged(), &own.reduced(), &own.fetched(), &own.header().monitored_out.flag}) {
    ring(*flag);  // whoever sleeps for this rank looks around now
  }
}

/// What a rank of another host says is passed on at once: this rank itself may be busy with something else, and so hear
/// of it late, while its neighbours wait for it.
void Group::pass_on(const net::GroupPort::Told& told) {
  MutexLock lock(failure_mutex_);
  if (failure_.ok()) note_failure(told.failure);
}

Status Group::fail(Failure failure) {
  if (forked()) return check_alive();
  MutexLock lock(failure_mutex_);
  if (!failure_.ok()) return failure_;
  failure_ = failure;
  failed_.store(true, std::memory_order_seq_cst);
  standing_.reset();
  failure.context.clear(), failure.advice.clear();  // these are for who reads them here
  note_failure(failure);
  if (!closed()) {
    for (int s = 0; s < local_ranks(); ++s) ring(pad(s).header().mail_bell.flag);
  }
  const Status first = failure_;
  lock.unlock();
  device_.abort(first);
  tell_other_hosts(failure);
  tell_other_groups(failure);
  // A launcher that sees a rank die ends the others, often before the exception has come up to where it is printed.
  if (first.code() == Code::kPeerDied && !Roster::is_telling()) {
    NVX_LOG(kWarn, "%s", first.reason().c_str());
  } else {
    NVX_LOG(kInfo, "%s", first.reason().c_str());
  }
  return first;
}

void Group::tell_other_hosts(const Failure& failure) {
  if (port_ && !closed()) nvx::tell_other_hosts(*port_, topology(), failure);
}

void Group::abort(const std::string& why) {
  (void)fail({Code::kAborted,
              "group " + name() + " was aborted on " + topology().describe(rank()) + (why.empty() ? "" : ": " + why)});
}

/// For a wait on a rank of another host, of which the port knows what has become of it.
Status Group::fail_by_fate(const net::GroupPort::Fate& fate) {
  if (fate.left()) {
    fail_as_left(fate.rank);
    return failure();
  }
  if (fate.what == net::GroupPort::Fate::What::kGaveThisUp) {
    return fail({.code = Code::kPeerDied,
                 .cause = topology().describe(fate.rank) + ", asked by " + rank_name(rank()) + ", " + fate.why,
                 .advice = kAfterAStop,
                 .before = trouble_of(fate.rank),
                 .who = fate.rank});
  }
  return fail({.code = Code::kPeerDied,
               .cause = topology().describe(fate.rank) + " is lost: " + fate.why,
               .advice = see_log_of(rank_name(fate.rank)) + "; is its host up, and reachable from here?",
               .before = trouble_of(fate.rank),
               .who = fate.rank});
}

}  // namespace nvx
