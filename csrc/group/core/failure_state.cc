#include "group/core/failure_state.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/contain.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/per_process.h"
#include "group/core/wait_cycle.h"

namespace nvx {
namespace {

using kernel::Presence;

/// Whether this thread is reporting a failure to the other groups of its process.
thread_local bool reporting_to_others = false;

/// "; rank 3 gives no sign of life for 8.0 s", for a rank of another host.
std::string silence_of(const Members& members, net::GroupPort* port, int rank) {
  if (!port || members.local_rank_of(rank) >= 0) return "";
  MutexLock lock(port->mutex());
  const double span = std::chrono::duration<double>(port->silence(rank)).count();
  if (span < 1) return "";
  return "; " + members.rank_name(rank) + " gives no sign of life for " + seconds(span) + port->obstacle(rank);
}

/// The failure of another group of that rank's process, in words; empty if the rank has reported none.
std::string other_failure_of(const Members& members, net::GroupPort* port, int rank) {
  if (const int s = members.local_rank_of(rank); s >= 0) {
    const kernel::PadHeader& header = members.pad(s).header();
    if (header.group != members.id || !header.other_failure.readable()) return "";
    const std::optional<Failure> note = header.other_failure.read(members.size());
    return note ? note->cause : "";
  }
  if (!port) return "";
  MutexLock lock(port->mutex());
  return port->other_failure(rank).text;
}

/// Adds the failure of another group of that process, since the rank may not be at fault.
Failure with_other_failure(Failure failure, const Members& members, net::GroupPort* port) {
  failure.before = other_failure_of(members, port, failure.lost_rank);
  return failure;
}

/// Describes a cycle of two waits: a rank of another host for which this one waits gave up a wait of another group for
/// this rank, while this wait was in progress. Empty if there is none.
std::string cycle_between_hosts(const Members& members, net::GroupPort* port, const Awaited& awaited,
                                const std::string& call, Clock::time_point began) {
  constexpr std::chrono::milliseconds kOnTheWay{100};  // a report may arrive late, and this wait have begun meanwhile
  const auto name = [&](int rank) { return "rank " + std::to_string(members.global_rank(rank)); };
  for (const int rank : port ? awaited.ranks : std::vector<int>()) {
    if (members.local_rank_of(rank) >= 0) continue;
    MutexLock lock(port->mutex());
    const auto gave_up = port->other_failure(rank).gave_up_at;
    if (!gave_up || *gave_up < began + kOnTheWay) continue;
    return name(members.rank) + " waits in group " + members.name + " (" + call.substr(0, call.find_first_of("( ")) +
           ") for " + name(rank) + ", " + name(rank) + " waited in another group for " + name(members.rank);
  }
  return "";
}

}  // namespace

FailureState::FailureState(const Members& members, const Diagnosis& diagnosis, GroupStatus& status,
                           net::GroupPort* port, std::shared_ptr<bool> membership)
    : members_(members),
      diagnosis_(diagnosis),
      status_(status),
      port_(port),
      fork_generation_(nvx::fork_generation()),
      membership_(std::move(membership)) {}

// --- the first failure

Status FailureState::failure() const {
  if (forked()) return check_alive();
  MutexLock lock(mutex_);
  return failure_;
}

Status FailureState::fail(Failure failure) {
  if (forked()) return check_alive();
  MutexLock lock(mutex_);
  if (!failure_.ok()) return failure_;
  const Reporting reporting(reporting_);
  const bool reports = !closed();  // read here, because the program may leave once it sees the failure
  failure_ = failure;
  failed_.store(true, std::memory_order_seq_cst);
  membership_.reset();
  failure.context.clear();                                      // it concerns only this rank
  if (failure.code != Code::kMismatch) failure.advice.clear();  // the two ranks of a mismatch get one advice
  note(failure);
  if (reports) {
    for (int s = 0; s < members_.local_ranks(); ++s) ring(members_.pad(s).header().message_bell.flag);
  }
  const Status first = failure_;
  lock.unlock();
  status_.fail(failure.cause);
  act_(first);
  if (port_ && reports) notify_other_hosts(*port_, members_.topology, failure);
  if (reports) report_to_other_groups(failure);
  if (!reporting_to_others && reports) {  // once for all groups: each may have ranks that cannot be reached
    if (port_) {
      port_->messenger().flush_reports();
    } else if (const auto opened = net::Messenger::opened()) {
      opened->flush_reports();
    }
  }
  // A launcher that sees a rank die kills the others, often before the program has printed the exception.
  if (first.code() == Code::kPeerDied && !reporting_to_others) {
    NVX_LOG(kWarn, "%s", first.reason().c_str());
  } else {
    NVX_LOG(kInfo, "%s", first.reason().c_str());
  }
  return first;
}

Status FailureState::fail_begun(const Status& status) {
  if (failed()) return failure();
  Failure failure = status.failure();
  if (failure.code == Code::kInvalid) failure.code = Code::kSystem;
  return fail(std::move(failure));
}

/// Writes the note for the ranks of this host. The first note stays. A rank that has left in good order writes none.
void FailureState::note(const Failure& failure) {
  kernel::Pad own = members_.own_pad();
  if (own.header().presence.load(std::memory_order_relaxed) == Presence::kLeft) return;
  own.header().failure.write(failure);
  for (Flag* flag : {&own.arrival(0).flag, &own.arrival(1).flag, &own.arrival(2).flag, &own.arrival(3).flag,
                     &own.done(), &own.staged(), &own.reduced(), &own.fetched(), &own.header().monitored_out.flag}) {
    ring(*flag);  // wakes sleepers on any flag of this rank, so that they check for failures
  }
}

void FailureState::pass_on(const net::GroupPort::ReportedFailure& report) {
  MutexLock lock(mutex_);
  if (failure_.ok()) note(report.failure);
}

// --- whether operations may begin

bool FailureState::close() {
  if (closed_.exchange(true)) return false;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (reporting_ > 0 && !deadline.passed(Clock::now())) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return true;
}

void FailureState::forget_peers() {
  MutexLock lock(mutex_);
  membership_.reset();
}

void FailureState::announce_left() {
  MutexLock lock(mutex_);
  members_.own_pad().header().presence.store(Presence::kLeft);
  membership_.reset();
}

Status FailureState::check_alive(const char* what) const {
  if (forked()) return diagnosis_.forked(port_ != nullptr);
  if (failed()) return diagnosis_.failed_earlier(failure().failure(), what);
  if (closed()) return diagnosis_.closed();
  return {};
}

Status FailureState::failed_before(const std::string& what) const {
  return with_context(failure(), diagnosis_.me() + ", which called " + what + " after that");
}

// --- failures of others

bool FailureState::check_reports(Clock::duration grace) {
  if (first_reporter() < 0 && !(port_ && port_->failed())) [[likely]]
    return false;
  record_abort(-1, grace);
  return failed();
}

/// Repeats `check_reports()` for the span set by `set_report_grace()`.
bool FailureState::reported_in_time() {
  const auto end = Clock::now() + report_grace_.load(std::memory_order_relaxed);
  do {
    if (check_reports()) return true;
    port_->messenger().sleep(std::chrono::milliseconds(1));
    port_->messenger().try_progress();
  } while (Clock::now() < end);
  return false;
}

/// The first `local_rank` that has noted a failure, or -1.
int FailureState::first_reporter() const {
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s != members_.local_rank() && members_.pad(s).header().failure.readable()) return s;
  }
  return -1;
}

/// The failure that another rank has reported: one of this host first, then one of another host.
std::optional<net::GroupPort::ReportedFailure> FailureState::report() const {
  if (const int s = first_reporter(); s >= 0) {
    const int reporter = members_.ranks_of_host()[size_t(s)];
    const std::optional<Failure> note = members_.pad(s).header().failure.read(members_.size());
    return net::GroupPort::ReportedFailure{reporter, note.value_or(unreadable_note(members_.rank_name(reporter)))};
  }
  if (!port_ || !port_->failed()) return std::nullopt;
  MutexLock lock(port_->mutex());
  return port_->reported();
}

void FailureState::await_exact_report() const {
  if (failed()) return;
  if (const auto reported = report()) (void)seen_to_end(reported->failure, kEndingGrace);
}

/// A rank of another host reports that it has lost `report.lost_rank`. If that is a rank of this host whose process has
/// ended, returns its `local_rank`: this host can query how the process ended. Otherwise -1. The connections of a
/// process end a little before the process does, hence `grace`.
int FailureState::seen_to_end(const Failure& report, Clock::duration grace) const {
  if (report.code != Code::kPeerDied || report.exit_status.known() || report.lost_rank == kNoRank) return -1;
  const int s = members_.local_rank_of(report.lost_rank);
  if (s < 0 || s == members_.local_rank()) return -1;
  const auto has_left = [&] { return members_.pad(s).header().presence.load() != Presence::kHere; };
  for (const auto end = Clock::now() + grace; !members_.dead(s) && !has_left() && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return members_.died(s) ? s : -1;
}

bool FailureState::fail_as_reported() {
  if (first_reporter() < 0) return false;
  const auto reported = report();
  if (reported) fail_as_reported(*reported, kEndingGrace);
  return reported.has_value();
}

void FailureState::fail_as_reported(const net::GroupPort::ReportedFailure& report, Clock::duration grace) {
  if (const int s = seen_to_end(report.failure, grace); s >= 0) return fail_as_gone(s);
  (void)fail(diagnosis_.reported(report.failure, report.by));
}

void FailureState::fail_as_gone(int local_rank) {
  const kernel::PadHeader& header = members_.pad(local_rank).header();
  const int rank = members_.ranks_of_host()[size_t(local_rank)];
  if (header.group != members_.id || header.presence.load() == Presence::kLeft) return (void)fail_as_left(rank);
  const ExitStatus status = members_.peers[size_t(local_rank)]->exit_status();
  (void)fail(
      with_other_failure(diagnosis_.died(rank, members_.describe_local_rank(local_rank), status), members_, port_));
}

Status FailureState::fail_as_left(int rank) {
  const int s = members_.local_rank_of(rank);
  const std::string name = s >= 0 ? members_.describe_progress(s) : members_.topology.describe(rank);
  const bool ended = s >= 0 && members_.dead(s);
  const std::string how = ended ? "its process has ended" + text_of(members_.peers[size_t(s)]->exit_status(), " (", ")")
                                : "it has destroyed the group, or its process ends";
  return fail(with_other_failure(diagnosis_.left(rank, name, how), members_, port_));
}

Status FailureState::fail_by_departure(const net::GroupPort::Departure& departure) {
  if (departure.left()) return fail_as_left(departure.rank);
  const bool by_peer = departure.cause == net::GroupPort::Departure::Cause::kDeclaredThisLost;
  const Failure lost = by_peer ? diagnosis_.declared_lost(departure.rank, departure.why)
                               : diagnosis_.lost(departure.rank, departure.why);
  return fail(with_other_failure(lost, members_, port_));
}

Status FailureState::check_peers() {
  if (forked()) return check_alive();
  const bool watches = !closed();  // after that, peers may reuse the memory
  if (watches && !failed()) (void)check_reports();
  for (int s = 0; watches && s < members_.local_ranks() && !failed(); ++s) {
    members_.warn_if_stopped(s);
    if (members_.died(s)) fail_as_gone(s);
  }
  return failed() ? failure() : Status();
}

bool FailureState::check_interrupt() {
  if (forked() || !stop_requested()) return false;
  (void)fail(diagnosis_.interrupted());
  return true;
}

// --- waits

bool FailureState::should_abort(int local_rank) {
  if (failed() || closed() || first_reporter() >= 0 || (port_ && port_->failed())) return true;
  if (check_interrupt()) return true;
  const int own = members_.local_rank(), ranks = members_.local_ranks();
  if (local_rank >= 0) {
    if (local_rank == own) return false;
    members_.warn_if_stopped(local_rank);
    return members_.gone(local_rank);
  }
  // A wait for any rank: a rank that has died may be the one. Ranks that left in good order count once all have left.
  bool alive = port_ != nullptr || ranks == 1;
  for (int s = 0; s < ranks; ++s) {
    if (s == own) continue;
    if (members_.died(s)) return true;
    members_.warn_if_stopped(s);
    alive |= !members_.gone(s);
  }
  return !alive;
}

void FailureState::record_abort(int local_rank, Clock::duration grace) {
  if (failed()) return;
  if (const auto reported = report()) return fail_as_reported(*reported, grace);
  if (closed()) return (void)fail(diagnosis_.destroyed());
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank() || (local_rank >= 0 && s != local_rank) || !members_.gone(s)) continue;
    return fail_as_gone(s);
  }
}

void FailureState::sleeps(int local_rank) {
  const int rank = local_rank < 0 ? -1 : members_.ranks_of_host()[size_t(local_rank)];
  status_.sleeps(rank, members_.pid_of(rank));
}

void FailureState::waited(int local_rank, Clock::time_point began, Clock::duration slept) {
  const int rank = local_rank < 0 ? -1 : members_.ranks_of_host()[size_t(local_rank)];
  if (slept > Clock::duration(0)) status_.slept(rank, slept);
  if (began > Clock::time_point()) status_.waited(rank, began);
}

Status FailureState::explain_wait(Waited how, const Awaited& awaited, const std::string& what,
                                  const Deadline& deadline) {
  const std::string waited = seconds(deadline);
  const int first = awaited.ranks.empty() ? -1 : awaited.ranks.front();
  if (how == Waited::kTimedOut) status_.gave_up(first, members_.pid_of(first), what, deadline.start);
  if (how == Waited::kTimedOut && port_ && !failed() && reported_in_time()) how = Waited::kAlarmed;
  if (how == Waited::kAlarmed && failed()) {
    const Status first = failure();
    const bool named =
        awaited.names.empty() || awaited.ranks == std::vector{first.failure().lost_rank};  // in the first words
    return with_context(first,
                        diagnosis_.context(what) + ", waited " + waited + (named ? "" : " for " + awaited.names));
  }
  std::string names = awaited.names, before;
  if (names.empty()) names = awaited.ranks.empty() ? "the peers" : members_.topology.describe(awaited.ranks.front());
  for (const int rank : awaited.ranks) {
    names += silence_of(members_, port_, rank);
    if (before.empty()) before = other_failure_of(members_, port_, rank);
  }
  std::string cycle = cycle_of_waits(members_, awaited, what, deadline.start);
  if (cycle.empty() && !awaited.called) cycle = cycle_between_hosts(members_, port_, awaited, what, deadline.start);
  Failure failure = diagnosis_.timeout(what, waited, names, awaited.ranks.size(), cycle, diagnosis_.me());
  if (const pid_t pid = members_.pid_of(first); cycle.empty() && pid != 0) {
    const std::string name = members_.rank_name(first);
    if (const std::string how = members_.how_to_resume(first); !how.empty()) {
      failure.advice = "let " + name + " go on (" + how + "), and find out what has stopped it";
    } else {
      failure.advice += "; to see what " + name + " does: py-spy dump --pid " + std::to_string(pid);
    }
  }
  failure.before = before;
  if (!awaited.called) failure.awaited = awaited.ranks;
  return fail(std::move(failure));
}

// --- other groups of the process

void FailureState::report_to_other_groups(const Failure& failure) {
  const Code code = failure.reported_code();
  if (code == Code::kAborted) return;
  // A failure that came from another group keeps its origin.
  const std::string own = "group " + members_.name + " of " + diagnosis_.self() + " had failed: " + failure.cause;
  const Failure other_failure{failure.code, failure.before.empty() ? own : failure.before};
  const bool waited = code == Code::kTimeout;
  const bool by_loss = code == Code::kPeerDied || code == Code::kPeerFailed;
  const std::vector<Lost> lost = by_loss ? lost_ranks() : std::vector<Lost>();
  if (std::exchange(reporting_to_others, true)) return;  // the other groups of this process get it from this one
  LiveObjects<FailureState>::instance().each([&](FailureState& other) {
    const bool apart = port_ && other.port_ && &port_->messenger() != &other.port_->messenger();
    if (&other == this || apart) return;
    contain("reporting a failure to another group", [&] {
      Failure there = other_failure;
      if (waited) there.awaited = other.members_.ranks_of(members_, failure.awaited);
      other.on_failure_of_other_group(lost, there);
    });
  });
  reporting_to_others = false;
}

std::vector<FailureState::Lost> FailureState::lost_ranks() const {
  std::vector<Lost> lost;
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (members_.died(s)) lost.push_back({.local = members_.peers[size_t(s)].get()});
  }
  if (!port_) return lost;
  MutexLock lock(port_->mutex());
  for (int r = 0; r < members_.size(); ++r) {
    if (members_.local_rank_of(r) >= 0) continue;
    const auto departure = port_->departure(r);
    const auto process = port_->process_of(r);
    if (departure && !departure->left() && process)
      lost.push_back({.messenger = &port_->messenger(), .remote = *process});
  }
  return lost;
}

void FailureState::on_failure_of_other_group(const std::vector<Lost>& lost, const Failure& other_failure) {
  if (forked() || failed() || closed()) return;
  if (std::ranges::any_of(lost, [this](const Lost& l) { return fail_as_lost(l); })) return;
  {
    MutexLock lock(mutex_);
    kernel::PadHeader& own = members_.own_pad().header();
    if (own.presence.load(std::memory_order_relaxed) == Presence::kLeft) return;
    own.other_failure.write(other_failure);
  }
  if (!port_) return;
  MutexLock lock(port_->mutex());
  port_->report_other_failure(other_failure);
}

bool FailureState::fail_as_lost(const Lost& lost) {
  for (int s = 0; lost.local && s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank() || members_.peers[size_t(s)].get() != lost.local ||
        members_.pad(s).header().presence.load() != Presence::kHere)
      continue;
    fail_as_gone(s);
    return true;
  }
  for (int r = 0; lost.messenger && port_ && &port_->messenger() == lost.messenger && r < members_.size(); ++r) {
    MutexLock lock(port_->mutex());
    if (members_.local_rank_of(r) >= 0 || port_->process_of(r) != lost.remote) continue;
    const auto departure = port_->departure(r);
    lock.unlock();
    if (!departure || departure->left()) continue;
    (void)fail_by_departure(*departure);
    return true;
  }
  return false;
}

}  // namespace nvx
