#include "group/group.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/config.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "group/mailbox.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Presence;

bool on_main_thread() { return syscall(SYS_gettid) == getpid(); }

/// What a peer wrote about its failure, as printable text of bounded length.
std::string read_note(const kernel::FailureNote& note) {
  std::string text(note.text, strnlen(note.text, sizeof note.text));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text;
}

std::string seconds(const Deadline& deadline) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f s", deadline.elapsed_s());
  return text;
}

}  // namespace

std::string describe(const kernel::Fingerprint& f) {
  std::string text = f.collective <= Collective::kBarrier ? name(f.collective) : "an unknown operation";
  if (f.collective == Collective::kBarrier || f.collective == Collective::kNone) return text;
  const bool reduces = f.collective == Collective::kAllReduce || f.collective == Collective::kReduce ||
                       f.collective == Collective::kReduceScatter;
  text += "(";
  if (reduces && size_t(f.op) < kernel::kReduceOpCount) text += std::string(nvx::name(f.op)) + ", ";
  text += size_t(f.dtype) < kernel::kDTypeCount ? nvx::name(f.dtype) : "?";
  if (f.count) text += ", " + std::to_string(f.count) + " elements";
  if (f.root >= 0) text += ", root " + std::to_string(f.root);
  return text + ")";
}

Group::~Group() {
  if (fork_generation_ != nvx::fork_generation()) {
    // A forked child: all of this belongs to the parent, and its memory is not mapped here. It is left as it is.
    mailbox_.release();
    new auto(std::move(peers_));
    new auto(std::move(neighbours_));
    return;
  }
  leave();
  mailbox_.reset();
  neighbours_->leases().leave(this);
  {
    MutexLock lock(lease_mutex_);
    if (lease_) neighbours_->leases().bury(lease_, everybody_gone());
    lease_ = {};
  }
  neighbours_->arena().bury(pad_span_, everybody_gone());
}

std::function<bool()> Group::everybody_gone() const {
  return [peers = peers_, memory = memory_, id = id_, own = rank()] {
    for (size_t r = 0; r < peers.size(); ++r) {
      if (int(r) == own || (peers[r] && peers[r]->dead())) continue;
      const kernel::PadHeader& header = kernel::Pad(memory[r].pad, memory.size()).header();
      if (header.group == id && header.presence.load() != Presence::kLeft) return false;
    }
    return true;
  };
}

bool Group::gone(int peer) const {
  if (dead(peer)) return true;
  const kernel::PadHeader& header = pad(peer).header();
  return header.group != id_ || header.presence.load() == Presence::kLeft;
}

WaitRules Group::rules(std::chrono::milliseconds own, Carrier carrier) {
  WaitRules rules;
  rules.deadline = Deadline::after(own.count() > 0 && config().timeout_s <= 0 ? own : timeout());
  if (carrier == Carrier::kCaller) rules.patience = patience_.get();
  rules.watch = this;
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

Status Group::execute(Operation& operation) {
  if (lane_->begin_inline()) {
    Status status = run(operation, Carrier::kCaller);
    lane_->end_inline();
    return status;
  }
  const auto call = std::make_shared<QueuedCall>(*this, operation);
  lane_->submit(call);
  lane_->wait(*call, Lane::MayRun::kYes, [this] { return look_for_interrupt(), false; });
  return call->status();
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
  if (old) neighbours_->leases().release(old);
  const Span span = neighbours_->leases().acquire(bytes, this);
  lock.lock();
  lease_ = span;
}

void Group::rest_lease() {
  MutexLock lock(lease_mutex_);
  lease_in_use_ = false;
}

bool Group::read_by_all(uint32_t epoch) const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !reached(pad(r).done().value.load(std::memory_order_seq_cst), stamp(epoch, 0)) && !gone(r))
      return false;
  }
  return true;
}

Span Group::yield() {
  MutexLock lock(lease_mutex_);
  if (lease_in_use_ || !lease_ || failed() || !read_by_all(channel_->leased_epoch())) return {};
  return std::exchange(lease_, Span{});
}

Status Group::check_alive() const {
  if (fork_generation_ != nvx::fork_generation()) {
    return {Code::kInvalid,
            "nvx: this process was forked from rank " + std::to_string(rank()) +
                "; a group does not cross a fork. Start ranks with spawn, or init_process_group in the child"};
  }
  if (failed()) return failure();
  if (closed()) return {Code::kInvalid, "nvx: group " + name() + " has been destroyed"};
  return {};
}

Status Group::run(Operation& o, Carrier carrier) {
  NVX_TRY(check_alive());
  const bool reduces = o.collective == Collective::kAllReduce || o.collective == Collective::kReduce ||
                       o.collective == Collective::kReduceScatter;
  const kernel::ReduceFn reduce = reduces ? kernel::level().reduce(o.dtype, o.op) : nullptr;
  if (reduces && !reduce) {
    return {Code::kInvalid, std::string("nvx: ") + nvx::name(o.op) + " is not defined for " + nvx::name(o.dtype)};
  }
  const size_t bytes = staged_bytes(o);
  const Choice choice = plan(o.collective, bytes, facts_);
  const bool leases = choice.lease_bytes != 0;
  if (leases) {
    try {
      hold_lease(choice.lease_bytes);
    } catch (const Error& error) {
      return fail(error.code(), error.what() + 5, "");  // the others will wait for this rank in vain
    }
    MutexLock lock(lease_mutex_);
    channel_->lease(lease_.offset, lease_.bytes);
  }
  NVX_LOG(kTrace, "group %s #%llu %s %zu bytes: %s", name().c_str(), static_cast<unsigned long long>(o.number),
          nvx::name(o.collective), bytes, kernel::name(choice.algorithm));
  const WaitRules rules = this->rules(o.timeout, carrier);
  kernel::CpuExec ex(size_of(o.dtype), reduce, channel_->factors().data(), rules);
  kernel::Work work;
  work.call.fingerprint = {o.collective, o.dtype, reduces ? o.op : ReduceOp::kSum, 0, o.root, o.count, o.shape, 0};
  work.call.factor = o.factor;
  work.in = o.in;
  work.out = o.out;
  work.count = o.count;
  work.send = o.send.data();
  work.recv = o.recv.data();
  if (o.collective == Collective::kGather) work.meets_all = o.root == rank();
  if (o.collective == Collective::kScatter && o.root != rank()) work.meets_all = false, work.meets = o.root;
  if (o.collective == Collective::kScatter && o.root == rank()) work.meets_all = false;
  if (o.number == 0) o.number = next_number();
  const bool ended_well = kernel::launch_cpu(choice.algorithm, ex, *channel_, work);
  if (leases) rest_lease();
  if (ended_well) return {};
  return explain_verdict(ex.verdict(), o, rules.deadline);
}

std::string Group::missing_ranks() {
  std::string text;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    kernel::Arrival& there = pad(r).arrival(channel_->epoch());
    if (reached(there.flag.value.load(std::memory_order_seq_cst), stamp(channel_->epoch(), 0))) continue;
    text += (text.empty() ? "" : ", ") + topology_.describe(r);
  }
  return text;
}

Status Group::explain_verdict(const kernel::Verdict& v, const Operation& o, const Deadline& deadline) {
  const kernel::Fingerprint& mine = pad(rank()).arrival(channel_->epoch()).fingerprint;
  const std::string what = describe({o.collective, o.dtype, o.op, 0, o.root, o.count, o.shape, 0});
  const std::string number = "#" + std::to_string(o.number);
  const std::string context =
      "this is rank " + std::to_string(rank()) + " in " + what + " " + number + " of group " + name();
  const std::string peer = v.peer >= 0 ? topology_.describe(v.peer) : "";
  switch (v.cause) {
    case kernel::Verdict::Cause::kMismatch: {
      const kernel::Fingerprint& theirs = pad(v.peer).arrival(channel_->epoch()).fingerprint;
      std::string cause = "collective mismatch in group " + name() + " at " + number + ": " +
                          topology_.describe(rank()) + " called " + describe(mine) + ", " + peer + " called " +
                          describe(theirs);
      if (describe(mine) == describe(theirs)) {
        cause += theirs.history != mine.history ? ", after operations that differed already"
                                                : ", with different sizes by rank";
      }
      return fail(Code::kMismatch, cause,
                  context + ". Next: make all ranks call the same collectives in the same order");
    }
    case kernel::Verdict::Cause::kCounts:
      return fail(Code::kMismatch,
                  "collective mismatch in group " + name() + " at " + number + ": in " + what + " " +
                      topology_.describe(rank()) + " expects " + std::to_string(v.mine) + " bytes from " + peer +
                      ", which sends " + std::to_string(v.theirs) + " bytes",
                  context + ". Next: compare the split sizes of the two ranks");
    case kernel::Verdict::Cause::kBadLease:
      return fail(Code::kMismatch, peer + " describes staging memory that it cannot have", context);
    default: return explain_wait(v.how, v.peer, what + " " + number, missing_ranks(), deadline);
  }
}

Status Group::explain_wait(Waited how, int peer, const std::string& what, const std::string& missing,
                           const Deadline& deadline) {
  const std::string context = "this is rank " + std::to_string(rank()) + " in " + what + " of group " + name() +
                              ", waited " + seconds(deadline);
  if (how == Waited::kAlarmed && failed()) {
    const Status status = failure();
    return {status.code(), status.what() + "; " + context};
  }
  const std::string whom = !missing.empty() ? missing : peer >= 0 ? topology_.describe(peer) : "the peers";
  return fail(Code::kTimeout,
              "timed out in " + what + " of group " + name() + " after " + seconds(deadline) + ", waiting for " + whom,
              context + ". Next: look at what these ranks do, and at the timeout of the group");
}

/// The first rank that has noted a failure, or -1.
int Group::told_by() const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && pad(r).header().failure.state.load(std::memory_order_acquire) == 2) return r;
  }
  return -1;
}

bool Group::look_for_interrupt() {
  const InterruptCheck interrupted = interrupt_check.load(std::memory_order_relaxed);
  if (!interrupted || !on_main_thread() || !interrupted()) return false;
  (void)fail(Code::kInterrupted, "interrupted by the user on " + topology_.describe(rank()), "");
  return true;
}

bool Group::alarmed(int peer) {
  if (failed() || closed() || told_by() >= 0) return true;
  if (look_for_interrupt()) return true;
  if (peer >= 0) return peer != rank() && gone(peer);
  // Waiting for any: one that has died may be the one; those that left in good order are missed when all have.
  bool somebody = false;
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && dead(r) && pad(r).header().presence.load() == Presence::kHere) return true;
    somebody |= r == rank() ? size() == 1 : !gone(r);
  }
  return !somebody;
}

void Group::alarm(int peer) {
  if (failed()) return;
  if (const int r = told_by(); r >= 0) {
    (void)fail(Code::kPeerFailed, read_note(pad(r).header().failure), "told by rank " + std::to_string(r));
    return;
  }
  if (closed()) {
    (void)fail(Code::kAborted,
               "group " + name() + " was destroyed on " + topology_.describe(rank()) + " with operations in flight",
               "");
    return;
  }
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || (peer >= 0 && r != peer) || !gone(r)) continue;
    if (pad(r).header().group == id_ && pad(r).header().presence.load() != Presence::kLeft) {
      (void)fail(Code::kPeerDied, topology_.describe(r) + " has ended" + peers_[size_t(r)]->how_it_ended(" (", ")"),
                 "Next: see that rank's log; killed by the kernel? dmesg | grep -i kill");
    } else {
      (void)fail(Code::kPeerLeft,
                 topology_.describe(r) + " has destroyed group " + name() + ", in which it is still waited for", "");
    }
    return;
  }
}

Status Group::failure() const {
  MutexLock lock(failure_mutex_);
  return failure_;
}

Status Group::fail(Code code, const std::string& cause, const std::string& context) {
  MutexLock lock(failure_mutex_);
  if (!failure_.ok()) return failure_;
  failure_ = Status(code, "nvx: " + cause + (context.empty() ? "" : "; " + context));
  failed_.store(true, std::memory_order_release);
  standing_.reset();
  kernel::Pad own = pad(rank());
  kernel::FailureNote& note = own.header().failure;
  note.state.store(1, std::memory_order_relaxed);
  note.code = uint32_t(code);
  std::snprintf(note.text, sizeof note.text, "%s", cause.c_str());
  note.state.store(2, std::memory_order_release);
  for (Flag* flag : {&own.arrival(0).flag, &own.arrival(1).flag, &own.arrival(2).flag, &own.arrival(3).flag,
                     &own.done(), &own.staged(), &own.reduced(), &own.fetched(), &own.header().monitored_out.flag}) {
    ring(*flag);  // whoever sleeps for this rank looks around now
  }
  if (!closed()) {
    for (int r = 0; r < size(); ++r) ring(pad(r).header().mail_bell.flag);
  }
  NVX_LOG(kInfo, "%s", failure_.what().c_str() + 5);
  return failure_;
}

void Group::abort(const std::string& why) {
  if (fork_generation_ != nvx::fork_generation()) return;
  (void)fail(Code::kAborted,
             "group " + name() + " was aborted on " + topology_.describe(rank()) + (why.empty() ? "" : ": " + why), "");
}

/// Peers use their memory again once this rank has left, so it must have stopped looking at it by then: what is in
/// flight ends first, within a watch interval.
void Group::leave() {
  if (fork_generation_ != nvx::fork_generation() || left_.exchange(true)) return;
  lane_->await_idle(std::chrono::seconds(10));
  mailbox_->close();
  pad(rank()).header().presence.store(Presence::kLeft);
  MutexLock lock(failure_mutex_);
  standing_.reset();
}

Status Group::monitored_barrier(std::chrono::milliseconds timeout, bool name_all) {
  NVX_TRY(check_alive());
  const WaitRules rules = this->rules(timeout, Carrier::kCaller);
  const Stamp turn = ++monitored_;
  const std::string context = "; this is rank " + std::to_string(rank()) + " in monitored_barrier of group " + name();
  Flag& out = pad(0).header().monitored_out.flag;
  if (rank() != 0) {
    signal(pad(rank()).header().monitored_in.flag, turn);
    if (wait(out, turn, 0, rules) == Waited::kReached) return {};
    if (failed()) return {failure().code(), failure().what() + context};
    return {Code::kTimeout,
            "nvx: Rank " + std::to_string(rank()) +
                " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                "rank 0. Please check rank 0 logs for faulty rank."};
  }
  if (timeout.count() <= 0) return {Code::kTimeout, "nvx: Rank 0 timed out in monitoredBarrier after 0 ms"};
  std::string missing;
  int count = 0;
  for (int r = 1; r < size(); ++r) {
    if (wait(pad(r).header().monitored_in.flag, turn, r, rules) == Waited::kReached) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    ++count;
    if (!name_all) break;
  }
  if (count == 0) {
    signal(out, turn);
    return {};
  }
  return {Code::kTimeout, std::string("nvx: ") + (count == 1 && !name_all ? "Rank " : "Ranks ") + missing +
                              " failed to pass monitoredBarrier in " + seconds(rules.deadline) +
                              (failed() ? ": " + failure().what().substr(5) + context : "")};
}

}  // namespace nvx
