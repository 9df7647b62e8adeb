// Steps, runs and their ends, common to all collectives over several hosts. The collectives are in
// `hierarchical_reduce.cc` and `hierarchical_move.cc`.

#include "group/hierarchy/hierarchical.h"

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

/// A rank may wait for one that also waits. So at the deadline a rank that waits for a first arrival reports at once,
/// one that waits for another host a little later, and one in a later step last.
constexpr std::chrono::milliseconds kDoubtOfHosts{500};
constexpr std::chrono::milliseconds kDoubtOfSteps{1000};

constexpr size_t kKeptRoom = 1 << 20;  ///< bytes of scratch that a group keeps between operations

net::Label label_of(const kernel::Fingerprint& fingerprint) {
  net::Label label;
  static_assert(sizeof label == sizeof fingerprint);
  std::memcpy(label.data(), &fingerprint, sizeof label);
  return label;
}

kernel::Fingerprint fingerprint_of(const net::Label& label) {
  kernel::Fingerprint fingerprint;
  std::memcpy(&fingerprint, label.data(), sizeof fingerprint);
  return fingerprint;
}

}  // namespace

Hierarchical::Hierarchical(Core& core, IntraHost& intra_host)
    : core_(core),
      members_(core.members),
      intra_host_(intra_host),
      port_(*core.port),
      host_(size_t(members_.topology.host_of[size_t(members_.rank)])) {}

Hierarchical::~Hierarchical() {
  MutexLock lock(port_.mutex());
  active_.clear();
}

Status Hierarchical::run(Operation& o, Carrier carrier) {
  Call call{o, core_.waits.rules_of(o, carrier), size_of(o.dtype), label_of(o.fingerprint()), terms_here(o)};
  call.rules.driver = this;
  core_.failures.doubt(std::chrono::milliseconds(0));
  ++op_;
  {
    MutexLock lock(port_.mutex());
    port_.calls().begin(op_, call.label);
  }
  if (reduces(o.collective)) call.combine = kernel::level().reduce(o.dtype, call.terms.between);
  Status status;
  try {
    status = o.proxy ? run_proxy(call) : perform(call);
  } catch (...) {
    (void)end();
    throw;
  }
  const std::optional<net::CallLabels::Theirs> late_label = end();
  if (room_.size() > kKeptRoom) std::vector<std::byte>().swap(room_);
  return !status.ok() || !late_label ? status : explain_late_label(o, *late_label);
}

Status Hierarchical::perform(Call& call) {
  switch (call.o.collective) {
    case kernel::Collective::kAllReduce: return all_reduce(call);
    case kernel::Collective::kReduce: return reduce(call);
    case kernel::Collective::kReduceScatter: return reduce_scatter(call);
    case kernel::Collective::kAllGather: return all_gather(call);
    case kernel::Collective::kBroadcast: return broadcast(call);
    case kernel::Collective::kAllToAll: return all_to_all(call);
    case kernel::Collective::kGather: return to_or_from_root(call, Direction::kToRoot);
    case kernel::Collective::kScatter: return to_or_from_root(call, Direction::kFromRoot);
    case kernel::Collective::kBarrier: return barrier(call);
    case kernel::Collective::kNone: break;
  }
  return {};
}

Status Hierarchical::perform(Call& call, Operation& part) {
  Call of_part{part, call.rules, call.width, call.label, call.terms, call.combine, call.runs};
  const Status status = perform(of_part);
  call.runs = of_part.runs;
  return status;
}

/// Around a root not all ranks exchange data. So a rank may find out only from a message of a later operation that
/// another one had called a different operation.
Status Hierarchical::explain_late_label(const Operation& o, const net::CallLabels::Theirs& late_label) {
  const std::optional<net::Label> own = [&] {
    MutexLock lock(port_.mutex());
    return port_.calls().here(late_label.op);
  }();
  if (own == late_label.label) return {};
  const std::string where = (late_label.op == op_ ? " at #" : " before #") + std::to_string(o.number);
  const Called theirs{members_.topology.describe(late_label.rank), fingerprint_of(late_label.label)};
  const std::string how = own ? contrast({core_.diagnosis.self(), fingerprint_of(*own)}, theirs)
                              : theirs.who + " called " + describe(theirs.what) + ", this rank another operation";
  return core_.failures.fail(core_.diagnosis.mismatch(where, how, ""));
}

/// Abandons runs that have not ended: on return, nothing accesses the operation's memory. Returns the call of another
/// rank under the operation's number, if it was a different one.
std::optional<net::CallLabels::Theirs> Hierarchical::end() {
  MutexLock lock(port_.mutex());
  std::vector<net::ScheduleRun*> open;
  for (const auto& active : active_) {
    if (active->run) open.push_back(active->run.get());
  }
  if (!open.empty()) net::ScheduleRun::abandon(port_, open);
  active_.clear();
  port_.end_operation(op_ + 1);
  return port_.calls().take_late();
}

/// Called during waits for a step inside the host. A sleeper calls it about once a millisecond, so each call takes in
/// everything that has arrived, in at most 64 rounds. If another thread holds the port, that thread advances the runs.
void Hierarchical::drive() {
  constexpr int kMostMoves = 64;
  if (active_.empty() || !port_.mutex().try_lock()) return;
  port_.messenger().mutex().held_by_caller();
  bool moved = true;
  for (int i = 0; moved && i < kMostMoves; ++i) {
    moved = port_.messenger().progress();
    for (const auto& active : active_) {
      if (active->run) active->run->advance();
    }
  }
  port_.mutex().unlock();
}

Status Hierarchical::stage(Call& call, Stage stage) {
  stage.op = call.terms.inside;
  stage.factor = call.terms.factor;
  const Status status = intra_host_.run_stage(stage, call.o, call.rules);
  core_.failures.doubt(kDoubtOfSteps);
  return status;
}

const std::byte* Hierarchical::own_term(Call& call, const std::byte* in, size_t bytes, std::byte* room) {
  if (!call.terms.scales() || bytes == 0) return in;
  const void* sources[] = {in};
  kernel::level().reduce(call.o.dtype, ReduceOp::kPremulSum)(room, sources, 1, bytes / call.width, &call.terms.factor);
  return room;
}

void Hierarchical::divide(const Call& call, std::byte* data, size_t bytes) const {
  if (call.terms.divisor != 1) kernel::level().divide(call.o.dtype)(data, bytes / call.width, call.terms.divisor);
}

Status Hierarchical::overlap(size_t steps, const Step& issue, const Step& retire) {
  for (size_t i = 0; i < steps + kSlicesInFlight; ++i) {
    if (i < steps) NVX_TRY(issue(i));
    if (i >= kSlicesInFlight && i - kSlicesInFlight < steps) NVX_TRY(retire(i - kSlicesInFlight));
  }
  return {};
}

std::byte* Hierarchical::lay_out(const std::vector<kernel::Piece>& pieces, std::vector<schedule::Block>& blocks) {
  std::byte* base = nullptr;
  for (const kernel::Piece& piece : pieces) {
    if (piece.bytes != 0 && (!base || piece.data < base)) base = piece.data;
  }
  for (const kernel::Piece& piece : pieces)
    blocks.push_back({piece.bytes ? size_t(piece.data - base) : 0, piece.bytes});
  return base;
}

std::byte* Hierarchical::room(size_t bytes) {
  if (room_.size() < bytes) room_.resize(bytes);
  return room_.data();
}

// --- the same on all ranks

Terms Hierarchical::terms_here(const Operation& o) const {
  return terms_of(o.dtype, o.op, o.factor, size_t(members_.size()));
}

InterHostPlan Hierarchical::inter_host_plan(const Operation& o) const {
  const PlanFacts& facts = members_.facts;
  const size_t longest = std::max(o.send.longest(), o.recv.longest());
  switch (o.collective) {
    case kernel::Collective::kReduceScatter:
      return plan_between(across(o.collective), o.planned(longest * o.send.size()), facts);
    case kernel::Collective::kAllGather: {
      Blocks alike = rounds() == 1 ? Blocks::kAlike : Blocks::kOfAnySize;
      for (size_t r = 0; r < o.recv.size(); ++r) {
        if (o.recv[r].bytes != o.recv[0].bytes) alike = Blocks::kOfAnySize;
      }
      return plan_between(across(o.collective), longest, facts, alike);
    }
    default: return plan_between(across(o.collective), o.planned(o.count * size_of(o.dtype)), facts);
  }
}

// --- which rank carries which part

int Hierarchical::rank_at(size_t host, size_t local_rank) const {
  const std::vector<int>& there = members_.topology.hosts[host];
  return local_rank < there.size() ? there[local_rank] : -1;
}

Hierarchical::PeerSet Hierarchical::rail(size_t local_rank) const {
  PeerSet peers{{}, int(host_)};
  for (size_t host = 0; host < members_.topology.hosts.size(); ++host)
    peers.members.push_back(rank_at(host, local_rank));
  return peers;
}

Hierarchical::PeerSet Hierarchical::leaders() const { return rail(0); }

Hierarchical::PeerSet Hierarchical::leaders_with(int root) const {
  PeerSet peers = leaders();
  peers.members[size_t(members_.topology.host_of[size_t(root)])] = root;
  return peers;
}

size_t Hierarchical::rounds() const {
  size_t most = 0;
  for (const std::vector<int>& host : members_.topology.hosts) most = std::max(most, host.size());
  return (most + rails() - 1) / rails();
}

kernel::Piece Hierarchical::part_of(kernel::Piece whole, size_t slice, size_t k, size_t rail, size_t width) const {
  const size_t at = k * slice;
  schedule::Layout layout;
  layout.width = width;
  const schedule::Block b =
      rail < rails() ? layout.part(std::min(slice, whole.bytes - at), int(rail), int(rails())) : schedule::Block{};
  return {whole.data + at + b.offset, b.bytes};
}

kernel::Piece Hierarchical::slice_of(const Pieces& blocks, const Cut& cut, size_t k, size_t host, size_t round,
                                     size_t rail) const {
  const int rank = rail < rails() ? rank_at(host, rail + round * rails()) : -1;
  return rank < 0 ? kernel::Piece{} : cut.of(blocks[size_t(rank)], k);
}

// --- runs

Hierarchical::Active& Hierarchical::prepare(Call& call, const schedule::Row* row, const PeerSet& peers) {
  if (call.runs == 0) {
    NVX_LOG(kTrace, "group %s rank %d #%llu %s between hosts: %s", members_.name.c_str(), members_.rank,
            static_cast<unsigned long long>(call.o.number), nvx::name(call.o.collective), row->name);
  }
  active_.push_back(std::make_unique<Active>());
  Active& active = *active_.back();
  active.members = peers.members;
  net::ScheduleArgs& e = active.args;
  e.row = row;
  e.layout.size = int(peers.members.size());
  e.layout.width = reduces(call.o.collective) ? call.width : 1;  // data that is only moved may be cut anywhere
  e.place = peers.place;
  e.reduce = call.combine;
  e.label = call.label;
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
  active.run = std::make_unique<net::ScheduleRun>(port_, std::move(e));
  active.run->advance();
}

Status Hierarchical::finish(Call& call) {
  net::ScheduleRun& run = *active_.front()->run;
  net::Progress progress = net::Progress::kPending;
  const auto ended = [&] {
    for (const auto& active : active_) {
      if (active->run) active->run->advance();
    }
    progress = run.advance();
    return progress != net::Progress::kPending;
  };
  core_.failures.doubt(kDoubtOfHosts);
  const Waited how = port_.messenger().wait(
      ended, [&] { run.look(); }, -1, call.rules);
  if (how != Waited::kReached || progress == net::Progress::kFailed) return explain(call, run, how);
  MutexLock lock(port_.mutex());
  active_.pop_front();
  return {};
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
  std::optional<net::GroupPort::Fate> fate;
  {
    MutexLock lock(port_.mutex());
    v = run.verdict();
    whom.ranks = run.unheard();
    if (whom.ranks.empty()) {  // they have called too, and wait for others, which report first
      whom.ranks = run.waits_for();
      state = whom.ranks.size() == 1 ? ", which is in it too: see there for whom it waits"
                                     : ", which are in it too: see there for whom they wait";
      core_.failures.doubt(kDoubtOfSteps);
    }
    for (const int rank : whom.ranks) {
      whom.words += (whom.words.empty() ? "" : ", ") + members_.topology.describe(rank);
    }
    if (!whom.ranks.empty() && how == Waited::kTimedOut) whom.words += state;
    if (v.cause == Cause::kLost) fate = port_.fate(v.rank);
  }
  const std::string peer = v.rank >= 0 ? members_.topology.describe(v.rank) : "";
  switch (v.cause) {
    case Cause::kMismatch: {
      const std::string how = contrast({diagnosis.self(), call.o.fingerprint()}, {peer, fingerprint_of(v.theirs)});
      return core_.failures.fail(diagnosis.mismatch(" at " + number, how, context));
    }
    case Cause::kCounts:
      return core_.failures.fail(diagnosis.counts(" at " + number, what, {peer, v.mine, v.other}, context));
    case Cause::kGarbage: return core_.failures.fail(diagnosis.bad_message(peer, what, context));
    case Cause::kLost:
      return met_in(core_.failures.fail_by_fate(
                        fate.value_or(net::GroupPort::Fate{v.rank, net::GroupPort::Fate::What::kLost, "was closed"})),
                    context);
    case Cause::kNone: break;
  }
  if (how == Waited::kReached) {
    core_.failures.alarm(-1);  // another rank has failed the group
    how = Waited::kAlarmed;
  }
  return core_.failures.explain_wait(how, whom, what + " " + number, call.rules.deadline);
}

}  // namespace nvx
