// Drives the slices of collectives (`slices.h`): their steps inside the host, and their runs between hosts.

#include "group/hierarchy/hierarchical.h"

#include <bit>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

/// A rank may wait for one that also waits. So at the deadline a rank that waits for a first arrival reports at once,
/// one that waits for another host a little later, and one in a later step last.
constexpr std::chrono::milliseconds kReportGraceHosts{500};
constexpr std::chrono::milliseconds kReportGraceSteps{1000};

constexpr size_t kKeptScratch = 1 << 20;       ///< bytes of scratch that a group keeps between operations
constexpr size_t kKeptScratchOfRun = 1 << 16;  ///< the same of each run

/// On a host with one rank: copies the rank's input as the host's term, times the factor for PREMUL_SUM.
Status copy_own_term(const Operation& step) {
  const bool blocks = step.collective == kernel::Collective::kReduceScatter;
  const size_t bytes = blocks ? step.send[0].bytes : step.count * size_of(step.dtype);
  const void* sources[] = {blocks ? step.send[0].data : step.in};
  if (bytes != 0 && step.op == ReduceOp::kPremulSum) {
    kernel::level().reduce(step.dtype, step.op)(step.out, sources, 1, bytes / size_of(step.dtype), &step.factor);
  } else if (bytes != 0) {
    std::memcpy(step.out, sources[0], bytes);
  }
  return {};
}

/// Traces the waits between hosts: whenever the awaited rank changes, and at the end.
class AwaitedRank {
 public:
  explicit AwaitedRank(GroupStatus& status) : status_(status) {}
  ~AwaitedRank() { is(-1); }
  AwaitedRank(const AwaitedRank&) = delete;

  void is(int rank) {
    if (rank == rank_) return;
    if (rank_ >= 0) status_.waited(rank_, since_);
    rank_ = rank, since_ = Clock::now();
  }

 private:
  GroupStatus& status_;
  int rank_ = -1;
  Clock::time_point since_;
};

kernel::Fingerprint fingerprint_of(const net::FingerprintBytes& bytes) {
  return std::bit_cast<kernel::Fingerprint>(bytes);
}

}  // namespace

Hierarchical::Hierarchical(Core& core, IntraHost& intra_host)
    : core_(core),
      members_(core.members),
      facts_(members_.facts),
      intra_host_(intra_host),
      port_(*core.port),
      rails_(members_) {}

Hierarchical::~Hierarchical() {
  MutexLock lock(port_.mutex());
  active_.clear();
}

Status Hierarchical::run(Operation& o, const WaitRules& rules) {
  Call call{o, rules, std::bit_cast<net::FingerprintBytes>(o.fingerprint()),
            split_of(o.dtype, o.op, o.factor, size_t(members_.size()))};
  call.rules.driver = this;
  core_.failures.set_report_grace(std::chrono::milliseconds(0));
  ++op_;
  {
    MutexLock lock(port_.mutex());
    port_.calls().begin(op_, call.fingerprint);
  }
  if (reduces(o.collective)) call.combine = kernel::level().reduce(o.dtype, call.split.between);
  Status status;
  try {
    status = o.proxy ? run_proxy(call) : perform(call);
  } catch (...) {
    (void)end();
    throw;
  }
  const std::optional<net::CallFingerprints::Theirs> late = end();
  intra_host_.remember(o);  // behind its steps, which compare the calls before it
  if (scratch_.size() > kKeptScratch) std::vector<std::byte>().swap(scratch_);
  return !status.ok() || !late ? status : explain_late_call(o, *late);
}

Status Hierarchical::perform(Call& call) {
  switch (call.o.collective) {
    case kernel::Collective::kAllToAll: return all_to_all(call);
    case kernel::Collective::kGather:
    case kernel::Collective::kScatter: return to_or_from_root(call);
    case kernel::Collective::kBarrier: return barrier(call);
    case kernel::Collective::kNone: return {};
    default: return run_slices(call);
  }
}

/// A rank that is alone on its host does the steps before a run by itself, and has no peer for those after it.
Status Hierarchical::run_slices(Call& call) {
  const std::unique_ptr<Slices> slices = this->slices(call.o);
  if (scratch_.size() < slices->scratch_bytes()) scratch_.resize(slices->scratch_bytes());
  slices->use(scratch_.data());
  if (const auto step = slices->collect_for_rails()) NVX_TRY(run_inside(call, *step));
  const auto issue = [&](size_t k) -> Status {
    for (const Operation& step : slices->before(k))
      NVX_TRY(rails_.alone() ? copy_own_term(step) : run_inside(call, step));
    return {};
  };
  const auto retire = [&](size_t k) -> Status {
    if (rails_.alone()) return {};
    for (const Operation& step : slices->after(k)) NVX_TRY(run_inside(call, step));
    for (const CopyPair& copy : slices->unpack(k)) {
      if (copy.host.bytes != 0) std::memcpy(copy.device.data, copy.host.data, copy.host.bytes);
    }
    return {};
  };
  NVX_TRY(overlap(call, *slices, kSlicesInFlight, issue, retire));
  const auto deliver = slices->return_from_rails();
  return deliver ? run_inside(call, *deliver) : Status();
}

/// Around a root not all ranks meet. So a message of a later operation may show a rank that calls differed.
Status Hierarchical::explain_late_call(const Operation& o, const net::CallFingerprints::Theirs& late) {
  const std::optional<net::FingerprintBytes> own = [&] {
    MutexLock lock(port_.mutex());
    return port_.calls().own(late.op);
  }();
  if (own == late.fingerprint) return {};
  const std::string where = (late.op == op_ ? " at #" : " before #") + std::to_string(o.number);
  const Called theirs{members_.topology.describe(late.rank), fingerprint_of(late.fingerprint)};
  const std::string how = own ? describe_difference({core_.diagnosis.self(), fingerprint_of(*own)}, theirs)
                              : theirs.name + " called " + describe(theirs.what) + ", this rank another operation";
  return core_.failures.fail(core_.diagnosis.mismatch(where, how, ""));
}

/// Abandons runs that have not ended: on return, nothing accesses the operation's memory. Returns the call of another
/// rank under the operation's number, if it was a different one.
std::optional<net::CallFingerprints::Theirs> Hierarchical::end() {
  MutexLock lock(port_.mutex());
  std::vector<net::ScheduleRun*> open;
  for (Active& active : active_) {
    if (active.run) open.push_back(&*active.run);
  }
  if (!open.empty()) net::ScheduleRun::abandon(port_, open);
  while (!active_.empty()) put_aside(active_.begin());
  port_.end_operation(op_ + 1);
  return port_.calls().take_late();
}

/// Called during waits for a step inside the host. A sleeper calls it about once a millisecond, so each call takes in
/// everything that has arrived, in at most 64 rounds. If another thread holds the port, that thread advances the runs.
void Hierarchical::drive() {
  constexpr int kMostMoves = 64;
  if (active_.empty() || !port_.mutex().try_lock()) return;
  const MutexLock lock(port_.mutex(), std::adopt_lock);
  port_.messenger().mutex().held_by_caller();
  bool moved = true;
  for (int i = 0; moved && i < kMostMoves; ++i) {
    moved = port_.messenger().progress();
    for (Active& active : active_) {
      if (active.run) active.run->advance();
    }
  }
}

Status Hierarchical::run_inside(Call& call, const Operation& step) {
  const Status status = intra_host_.run(step, call.o, call.rules);
  core_.failures.set_report_grace(kReportGraceSteps);
  return status;
}

void Hierarchical::divide(const Call& call, const kernel::Piece& sum) const {
  const size_t elements = sum.bytes / size_of(call.o.dtype);
  if (call.split.divisor != 1) kernel::level().divide(call.o.dtype)(sum.data, elements, call.split.divisor);
}

// --- runs

Hierarchical::Active& Hierarchical::prepare(Call& call, const schedule::Row* row, const PeerSet& peers) {
  if (call.runs == 0) {
    core_.status->runs(*row);
    NVX_LOG(kTrace, "group %s rank %d #%llu %s between hosts: %s", members_.name.c_str(), members_.rank,
            static_cast<unsigned long long>(call.o.number), nvx::name(call.o.collective), row->name);
  }
  if (spare_.empty()) spare_.emplace_back();
  active_.splice(active_.end(), spare_, spare_.begin());
  Active& active = active_.back();
  active.members = peers.members;
  active.args = {};  // those of an earlier operation that ended before its run began
  net::ScheduleArgs& e = active.args;
  e.row = row;
  e.layout.size = int(peers.members.size());
  e.layout.width =
      reduces(call.o.collective) ? size_of(call.o.dtype) : 1;  // data that is only moved may be cut anywhere
  e.place = peers.place;
  e.reduce = call.combine;
  e.fingerprint = call.fingerprint;
  e.op = op_;
  return active;
}

void Hierarchical::begin(Call& call, Active& active) {
  net::ScheduleArgs& e = active.args;
  e.run = call.runs++;
  e.members = active.members;
  e.absent = active.absent;
  e.layout.blocks = active.blocks;
  e.layout.to = active.to;
  e.layout.from = active.from;
  active.scratch.resize(e.row->scratch(e.layout, e.place));
  e.scratch = active.scratch.data();
  MutexLock lock(port_.mutex());
  active.run.emplace(port_, e);
  active.run->advance();
}

void Hierarchical::begin(Call& call, const Slices& slices, size_t k) {
  Active& active = prepare(call, slices.row(), slices.peers());
  active.args.on_device = call.o.proxy && call.o.proxy->on_device();
  Slices::Run run = slices.run(k);
  active.args.layout.bytes = run.bytes;
  active.args.layout.root = slices.root();
  active.args.input = run.input;
  active.args.output = run.output;
  active.blocks = std::move(run.blocks);
  begin(call, active);
}

Status Hierarchical::finish(Call& call) {
  net::ScheduleRun& run = *active_.front().run;
  net::Progress progress = net::Progress::kPending;
  AwaitedRank traced(*core_.status);
  const auto ended = [&] {
    for (Active& active : active_) {
      if (active.run) active.run->advance();
    }
    progress = run.advance();
    if (core_.status->traced()) traced.is(run.waits_first_for());
    return progress != net::Progress::kPending;
  };
  core_.failures.set_report_grace(kReportGraceHosts);
  const auto check_peers = [&] {
    run.check_peers();
    const std::vector<int> not_called = run.not_called(), awaited = not_called.empty() ? run.waits_for() : not_called;
    if (awaited.empty()) return;
    core_.status->slept(awaited.front(), kWatchInterval);
    core_.status->sleeps(awaited.front());
  };
  const Waited how = port_.messenger().wait(ended, check_peers, -1, call.rules);
  if (how != Waited::kReached || progress == net::Progress::kFailed) return explain(call, run, how);
  MutexLock lock(port_.mutex());
  put_aside(active_.begin());
  return {};
}

/// Ends the run, under the port's lock. Keeps its lists for later runs, and its memory unless that is large.
void Hierarchical::put_aside(std::list<Active>::iterator ended) {
  ended->run.reset();
  for (auto* list : {&ended->blocks, &ended->to, &ended->from}) list->clear();
  for (auto* memory : {&ended->scratch, &ended->input}) {
    if (memory->size() > kKeptScratchOfRun) std::vector<std::byte>().swap(*memory);
  }
  ended->absent.clear();
  spare_.splice(spare_.end(), active_, ended);
}

Status Hierarchical::finish_all(Call& call) {
  while (!active_.empty()) NVX_TRY(finish(call));
  return {};
}

Status Hierarchical::explain(Call& call, const net::ScheduleRun& run, Waited how) {
  const Diagnosis& diagnosis = core_.diagnosis;
  const std::string number = "#" + std::to_string(call.o.number), what = describe(call.o.fingerprint());
  const std::string context = diagnosis.context(what + " " + number);
  using Cause = net::ScheduleRun::Verdict::Cause;
  net::ScheduleRun::Verdict v;
  Awaited whom;
  std::string state;
  std::optional<net::GroupPort::Departure> departure;
  {
    MutexLock lock(port_.mutex());
    v = run.verdict();
    whom.ranks = run.not_called();
    if (whom.ranks.empty()) {  // they have called too, and wait for others, which report first
      whom.ranks = run.waits_for();
      whom.called = !whom.ranks.empty();
      state = whom.ranks.size() == 1 ? ", which has called it too: see its log for the rank that it waits for"
                                     : ", which have called it too: see their logs for the rank that they wait for";
      core_.failures.set_report_grace(kReportGraceSteps);
    }
    std::vector<std::string> names;
    for (const int rank : whom.ranks) names.push_back(members_.topology.describe(rank));
    whom.names = joined(names);
    if (!whom.ranks.empty() && how == Waited::kTimedOut) whom.names += state;
    if (v.cause == Cause::kLost) departure = port_.departure(v.rank);
  }
  const std::string peer = v.rank >= 0 ? members_.topology.describe(v.rank) : "";
  switch (v.cause) {
    case Cause::kMismatch: {
      const std::string how =
          describe_difference({diagnosis.self(), call.o.fingerprint()}, {peer, fingerprint_of(v.theirs)});
      return core_.failures.fail(diagnosis.mismatch(" at " + number, how, context));
    }
    case Cause::kCounts:
      return core_.failures.fail(diagnosis.counts(" at " + number, what, {peer, v.mine, v.other}, context));
    case Cause::kGarbage: return core_.failures.fail(diagnosis.bad_message(peer, what, context));
    case Cause::kLost:
      return with_context(core_.failures.fail_by_departure(departure.value_or(net::GroupPort::Departure{
                              v.rank, net::GroupPort::Departure::Cause::kLost, "its connection was closed"})),
                          context);
    case Cause::kNone: break;
  }
  if (how == Waited::kReached) {
    core_.failures.record_abort(-1);  // another rank has failed the group
    how = Waited::kAlarmed;
  }
  return core_.failures.explain_wait(how, whom, what + " " + number, call.rules.deadline);
}

}  // namespace nvx
