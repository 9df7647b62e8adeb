#include "group/device/kernel_executor.h"

#include <algorithm>
#include <cstring>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/text.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::DeviceVerdict;
using kernel::Fingerprint;
using kernel::Verdict;
using std::chrono::milliseconds;

template <class Word>
std::atomic_ref<Word> shared(Word& word) {
  return std::atomic_ref<Word>(word);
}

Fingerprint fingerprint_of(const uint64_t (&words)[kernel::kArrivalWords]) {
  Fingerprint f;
  std::memcpy(&f, words, sizeof f);
  f.form = kernel::Form::kDense;  // kernels use this field for their algorithm
  return f;
}

size_t listed_by(const Operation& o) { return o.collective == Collective::kNone ? 2 * o.send.size() : 0; }

Begins begins_on(const LaunchStream& stream) { return stream.capture != 0 ? Begins::kInReplays : Begins::kNow; }

milliseconds timeout_of(const Operation& operation, milliseconds timeout) {
  return operation.timeout.count() > 0 ? operation.timeout : std::max(timeout, milliseconds(0));
}

}  // namespace

KernelExecutor::KernelExecutor(DeviceRegistry& registry, Bootstrap& bootstrap, const ChannelOptions& options,
                               std::shared_ptr<kernel::KernelLauncher> launcher, std::shared_ptr<StreamOrder> order)
    : launcher_(std::move(launcher)),
      order_(std::move(order)),
      resources_(registry, bootstrap, options, *launcher_),
      facts_{resources_.channel().shape, options.force, options.tuning, resources_.multicast().bytes != 0,
             resources_.link()},
      diagnosis_(options.group, options.rank, options.name, options.describe),
      launched_(options.first_epoch),
      streams_(registry.id(), options.device),
      batch_(resources_.channel().shape.ranks),
      calls_(kCalls) {}

KernelExecutor::~KernelExecutor() { (void)finalize(); }

bool KernelExecutor::finalize() {
  constexpr milliseconds kAbortTime{200};  // the time within which aborted kernels end
  if (finalized_.exchange(true)) return has_ended();
  const milliseconds most = resources_.options().drain_timeout;
  bool over = false, stopped = false;
  for (uint64_t rounds = 0, before = 0;; ++rounds) {
    before = finished();
    over = await_end(has_verdict() ? std::min(most, kAbortTime) : most, &stopped);
    if (over || stopped || has_verdict() || finished() == before) break;
    if (rounds == 0)
      NVX_LOG(kInfo, "group %s: this rank leaves when the operations in flight on GPU %d have ended",
              resources_.options().group.c_str(), resources_.options().device);
  }
  if (over && captured_ == 0) return true;
  shared(resources_.control().abort).store(1, std::memory_order_release);
  const bool ended = over || await_end(kAbortTime);
  if (!ended || captured_ != 0)
    resources_.keep(ended ? ChannelResources::User::kReplay : ChannelResources::User::kKernel);
  if (over) return true;
  NVX_LOG(kWarn, "group %s: operations in flight on GPU %d were aborted%s", resources_.options().group.c_str(),
          resources_.options().device, ended ? "" : "; the memory that they may still write to is not used again");
  return ended;
}

/// Also waits for a thread in the middle of a launch, which the driver may block. stopped: set if Ctrl-C has ended the
/// wait; null: it cannot.
bool KernelExecutor::await_end(milliseconds most, bool* stopped) {
  const bool had_verdict = has_verdict();
  bool over = false;
  const auto ends = [&] {
    if (launch_mutex_.try_lock()) {
      over = has_ended();
      launch_mutex_.unlock();
    }
    if (stopped && stop_requested()) *stopped = true;
    return over || has_verdict() != had_verdict || (stopped && *stopped);
  };
  const bool ended = poll_until(ends, Deadline::after(std::max(most, milliseconds(1))));
  return ended && !over ? await_end(milliseconds(200)) : over;
}

bool KernelExecutor::settled() const {
  const bool reported = captured_ == 0 && !may_have_begun_ && finished() >= launched();
  return (reported || order_->ended()) && signals_have_ended();
}

bool KernelExecutor::has_ended() const { return order_->ended() && signals_have_ended(); }

uint32_t KernelExecutor::begun_epoch() const {
  return shared(resources_.control().begun).load(std::memory_order_acquire);
}

uint32_t KernelExecutor::ended_epoch() const {
  return kernel::least_ended(resources_.control(), resources_.channel().shape.blocks).epoch;
}

uint64_t KernelExecutor::finished() const {
  const uint64_t begun = launched();
  const kernel::BlockEnd least = kernel::least_ended(resources_.control(), resources_.channel().shape.blocks);
  return begun +
         uint64_t(int64_t(int32_t(least.epoch - least.replayed - uint32_t(begun))));  // may lag, but is never ahead
}

uint32_t KernelExecutor::direct() const { return shared(resources_.control().direct).load(std::memory_order_relaxed); }

bool KernelExecutor::has_verdict() const {
  return shared(resources_.control().verdict.state).load(std::memory_order_acquire) == DeviceVerdict::kReadable;
}

Status KernelExecutor::verdict() {
  if (!failed_.load(std::memory_order_acquire) && !has_verdict()) return {};
  MutexLock lock(mutex_);
  return failure_.ok() ? explain(resources_.control().verdict) : failure_;
}

void KernelExecutor::abort(const Status& why) {
  (void)verdict();  // an earlier failure stays
  shared(resources_.control().abort).store(1, std::memory_order_release);
  resources_.stop_kernels();
  MutexLock lock(mutex_);
  if (failure_.ok()) (void)(why.ok() ? explain_abort() : fail(why));
}

void KernelExecutor::note_dead(int rank) {
  shared(resources_.control().dead[rank / 64]).fetch_or(Stamp(1) << rank % 64, std::memory_order_release);
}

Status KernelExecutor::launch(std::span<const Operation* const> operations, const LaunchStream& stream,
                              milliseconds timeout, const CompletionFlag& completion) {
  MutexLock lock(launch_mutex_);
  if (finalized_.load()) return {Code::kInvalid, "nvx: " + self() + " has left group " + resources_.options().group};
  streams_.note(stream.native);
  resources_.update_pools();
  const Status behind = order_->follow(stream);
  if (!behind.ok()) return refused(behind, begins_on(stream), /*is_first=*/true);
  const Status begun = launch_batches(operations, stream, timeout, completion);
  const Status noted = order_->note(stream);
  return begun.ok() && !noted.ok() ? refused(noted, begins_on(stream), /*is_first=*/false) : begun;
}

Status KernelExecutor::launch_batches(std::span<const Operation* const> operations, const LaunchStream& stream,
                                      milliseconds timeout, const CompletionFlag& completion) {
  const Begins begins = begins_on(stream);
  kernel::DeviceChannel channel = resources_.channel();
  channel.by_replays = begins == Begins::kInReplays;
  for (size_t at = 0; at < operations.size();) {
    NVX_TRY(verdict());
    const size_t n = gather(operations.subspan(at), timeout, next_call(begins));
    if (n == 0)
      return refused({Code::kInvalid, "nvx: the operation has more pieces than a kernel launch can list"}, Begins::kNow,
                     /*is_first=*/at == 0);
    remember(operations.subspan(at, n), timeout, begins);
    if (at + n == operations.size()) channel.completion = completion.at, channel.completion_value = completion.what;
    const bool captured = begins == Begins::kInReplays;
    if (!captured) launched_.fetch_add(n, std::memory_order_release), resources_.options().on_launch();
    const Status status =
        launcher_->launch(channel, batch_.jobs(), batch_.pieces(), resources_.multicast(), stream.native);
    if (!status.ok() && !captured) launched_.fetch_sub(n, std::memory_order_release);
    if (!status.ok()) return refused(status, begins, /*is_first=*/at == 0);
    if (captured) captured_.fetch_add(uint32_t(n), std::memory_order_release);
    at += n;
  }
  return {};
}

Status KernelExecutor::signal(const kernel::SignalJob& job, const LaunchStream& stream) {
  MutexLock lock(launch_mutex_);
  if (finalized_.load()) return {Code::kInvalid, "nvx: " + self() + " has left group " + resources_.options().group};
  NVX_TRY(verdict());
  MutexLock signals(signals_mutex_);
  has_signals_.store(true, std::memory_order_release);
  resources_.options().on_launch();
  Status launched = kernel::signal_cuda(resources_.channel(), job, stream.native);
  if (launched.ok()) launched = signals_[stream.native].record(stream.native, /*capture=*/0);
  return launched.ok() ? launched : refused(launched, Begins::kNow, /*is_first=*/true);
}

bool KernelExecutor::signals_have_ended() const {
  if (!signals_mutex_.try_lock()) return false;
  const bool ended = std::ranges::all_of(signals_, [&](const auto& one) { return order_->passed(one.second); });
  signals_mutex_.unlock();
  return ended;
}

uint32_t KernelExecutor::next_call(Begins begins) const {
  return begins == Begins::kInReplays ? kCaptured | captured_.load() : call_of(launched() + 1);
}

/// Nothing has been launched, and no peer waits for it before a graph is replayed.
Status KernelExecutor::not_captured(const Status& status) const {
  Failure failure = reason_for("an operation of group " + resources_.options().group + " cannot be captured on GPU " +
                                   std::to_string(resources_.options().device) + " of " + self(),
                               status.failure(), "end this capture, on all ranks");
  failure.code = Code::kInvalid;
  return failure;
}

/// Peers wait for operations that were not launched here, so the group fails, unless the argument is invalid.
Status KernelExecutor::refused(const Status& status, Begins begins, bool is_first) {
  if (begins == Begins::kInReplays) return not_captured(status);
  if (is_first && status.code() == Code::kInvalid) return status;
  may_have_begun_ = true;
  MutexLock lock(mutex_);
  if (!failure_.ok()) return failure_;
  Failure failure = reason_for("GPU " + std::to_string(resources_.options().device) + " of " + self() +
                                   " cannot launch operations of group " + resources_.options().group,
                               status.failure(),
                               "an earlier kernel of the program may have failed; CUDA_LAUNCH_BLOCKING=1 shows which");
  failure.code = Code::kSystem;
  return fail(failure);
}

/// Gathers as many operations as fit in one launch; at least one, unless that one alone does not fit.
size_t KernelExecutor::gather(std::span<const Operation* const> operations, milliseconds timeout, uint32_t call) {
  batch_.clear();
  size_t n = 0;
  for (bool fits = true; fits && n < operations.size(); n += fits) {
    const Operation& o = *operations[n];
    fits = batch_.add(listed_by(o), [&](uint32_t index, kernel::Piece* table) {
      kernel::Job job = job_of(o, index, table, timeout);
      job.call = (call & kCaptured) | call_of(call + n);
      return job;
    });
  }
  return n;
}

kernel::Job KernelExecutor::job_of(const Operation& o, uint32_t index, kernel::Piece* table,
                                   milliseconds timeout) const {
  const DeviceChoice choice = choose(o);
  NVX_LOG(kTrace, "group %s rank %d #%llu %s on GPU %d: %s (%s)", resources_.options().group.c_str(),
          resources_.options().rank, static_cast<unsigned long long>(o.number), nvx::name(o.collective),
          resources_.options().device, kernel::name(choice.algorithm), choice.why);
  const kernel::DeviceChannel& channel = resources_.channel();
  kernel::Job job =
      o.collective == Collective::kNone
          ? kernel::job_of_moves({o.send.data(), o.send.size()}, {o.recv.data(), o.recv.size()}, index, table)
          : kernel::job_of(choice.algorithm, o.args_of({o.fingerprint(), o.factor, o.root}), channel.rank,
                           channel.shape.ranks, size_of(o.dtype), index, table);
  job.awaited = o.awaited, job.awaits = o.awaits;
  // A job that waits for the host has no timeout: the host has a deadline and ends a late job.
  if (!o.awaited) job.timeout_ns = uint64_t(std::chrono::nanoseconds(timeout_of(o, timeout)).count());
  if (kernel::has_chunks(choice.algorithm))
    kernel::put_places(job, channel.shape.ranks, table - index, resources_.options().place_of);
  return job;
}

/// Depends only on facts that all ranks share, such as the lengths of all pieces, which the fingerprint covers.
DeviceChoice KernelExecutor::choose(const Operation& o) const {
  const auto plan_of = [&](size_t bytes) { return plan(o.collective, bytes, facts_); };
  switch (o.collective) {
    case Collective::kAllReduce: return plan_all_reduce(o.count * size_of(o.dtype), o.dtype, o.op, facts_);
    case Collective::kReduce: return plan_of(o.count * size_of(o.dtype));
    case Collective::kBroadcast:
    case Collective::kAllGather: return plan_of(o.recv.longest());
    case Collective::kReduceScatter: return plan_of(o.send.longest());
    case Collective::kNone: return {kernel::DeviceAlgorithm::kMoveOwn, "copies of this rank alone"};
    default: return plan_of(0);
  }
}

void KernelExecutor::remember(std::span<const Operation* const> operations, milliseconds timeout, Begins begins) {
  MutexLock lock(mutex_);
  uint64_t epoch = launched();
  if (begins == Begins::kInReplays) captured_calls_.resize(captured_);  // removes failed captures
  for (const Operation* o : operations) {
    const Call call{++epoch, o->number, o->fingerprint(), timeout_of(*o, timeout)};
    if (begins == Begins::kInReplays) {
      captured_calls_.push_back(call);
    } else {
      calls_[epoch % kCalls] = call;
    }
  }
}

const KernelExecutor::Call* KernelExecutor::find(uint32_t call) const {
  static_assert(kernel::is_power_of_two(kCalls) && kCalls <= kCaptured);
  const size_t index = call_of(call);
  if (call & kCaptured) return index < captured_calls_.size() ? &captured_calls_[index] : nullptr;
  const Call& known = calls_[index % kCalls];
  return known.epoch != 0 && call_of(known.epoch) == index ? &known : nullptr;
}

std::string KernelExecutor::describe_call(uint32_t call, uint32_t epoch) const {
  if (call == kernel::SignalJob::kCall) return "a symm_mem barrier or signal";
  const Call* known = find(call);
  if (!known) return "the operation of epoch " + std::to_string(epoch);
  const std::string captured = call & kCaptured ? " (in a graph)" : "";
  return describe(known->fingerprint) + " #" + std::to_string(known->number ? known->number : known->epoch) + captured;
}

/// Names an earlier operation. Replays have epochs too, but the host does not count them.
std::string KernelExecutor::describe_epoch(uint32_t epoch) const {
  return captured_ == 0 ? describe_call(call_of(epoch), epoch) : "the operation of epoch " + std::to_string(epoch);
}

Status KernelExecutor::fail(const Status& status) {
  failure_ = status;
  failed_.store(true, std::memory_order_release);
  NVX_LOG(kInfo, "%s", failure_.reason().c_str());
  return failure_;
}

Status KernelExecutor::explain_abort() { return fail(diagnosis_.aborted()); }

/// The calls of both ranks, as far as they have exchanged them.
Failure KernelExecutor::mismatch(const DeviceVerdict& v, const std::string& context) const {
  const std::string peer = diagnosis_.describe(v.peer), what = describe_call(v.call, v.epoch);
  const Fingerprint mine = fingerprint_of(v.mine), theirs = fingerprint_of(v.theirs);
  if (v.mine[0] == 0) {  // no exchange at this operation: the peer has left only a digest
    return diagnosis_.mismatch(" before " + what,
                               "by the end of " + describe_epoch(uint32_t(v.wanted >> 32)) + " on " + self() + ", " +
                                   peer + " had called another operation",
                               context);
  }
  return diagnosis_.mismatch(" at " + what, describe_difference({self(), mine}, {peer, theirs}), context);
}

Status KernelExecutor::explain(const DeviceVerdict& v) {
  const std::string what = describe_call(v.call, v.epoch);
  const std::string context = diagnosis_.context(what) + ", on GPU " + std::to_string(resources_.options().device);
  const std::string peer = v.peer >= 0 ? diagnosis_.describe(v.peer) : "the peers";
  if (v.cause == Verdict::Cause::kMismatch) return fail(mismatch(v, context));
  if (v.cause == Verdict::Cause::kCounts) {
    const ByteCounts bytes{peer, v.mine[kernel::kBytesWord], v.theirs[kernel::kBytesWord]};
    return fail(diagnosis_.counts("", what, bytes, context));
  }
  if (v.how != Waited::kTimedOut) return explain_abort();
  const Call* call = find(v.call);
  const std::string after = call ? seconds(double(call->timeout.count()) / 1e3) : "";
  Failure late = diagnosis_.timeout(what, after, peer, v.peer >= 0 ? 1 : 0, /*cycle=*/"", context);
  if (v.peer >= 0) late.awaited = {resources_.options().rank_of(v.peer)};
  return fail(late);
}

}  // namespace nvx
