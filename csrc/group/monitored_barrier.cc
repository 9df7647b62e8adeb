#include "group/monitored_barrier.h"

#include <optional>
#include <thread>

#include "base/text.h"
#include "group/core/wait_cycle.h"

namespace nvx {
namespace {

constexpr size_t kMostDescribed = 8;

/// A barrier of this thread. A signal handler that runs in its wait may leave the group, or begin another barrier.
class Running {
 public:
  explicit Running(std::atomic<int>& all) : all_(all) { ++all_, innermost_ = this; }
  ~Running() { --all_, innermost_ = outer_; }
  Running(const Running&) = delete;

  /// How many of these are this thread's.
  static int own(const std::atomic<int>& all) {
    int own = 0;
    for (const Running* one = innermost_; one; one = one->outer_) own += &one->all_ == &all;
    return own;
  }

 private:
  static thread_local const Running* innermost_;
  std::atomic<int>& all_;
  const Running* const outer_ = innermost_;
};
thread_local const Running* Running::innermost_ = nullptr;

}  // namespace

/// The leading words are gloo's, since scripts match them.
Status MonitoredBarrier::run(std::chrono::milliseconds timeout, bool name_all) {
  const Running running(running_);  // before the check: a group that closes after it waits for this one
  NVX_TRY(core_.failures.check_alive("monitored_barrier"));
  const WaitRules rules = core_.waits.rules(timeout, Runner::kCaller);
  const std::string me = core_.diagnosis.context("monitored_barrier");
  if (members_.rank != 0) return follow_rank_0(me, rules);
  if (timeout.count() <= 0) {
    return {Code::kTimeout, "nvx: Rank 0 timed out in monitoredBarrier after 0 ms; " + me,
            "give the other ranks time to arrive (monitored_barrier(timeout=))"};
  }
  return watch_others(me, rules, name_all);
}

void MonitoredBarrier::settle(std::chrono::milliseconds most) const {
  const Deadline deadline = Deadline::after(most);
  const int own = Running::own(running_);
  while (running_ > own && !deadline.passed(Clock::now())) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// --- rank 0

Status MonitoredBarrier::watch_others(const std::string& me, const WaitRules& rules, bool name_all) {
  const Stamp turn = ++begun_;
  open_turn(turn);
  std::vector<int> missing;
  for (int r = 1; r < members_.size() && (name_all || missing.empty()); ++r) {
    const auto checked_in = [&](const Turns& theirs) { return reached(theirs.opened, turn); };
    if (await(r, checked_in, rules) != Waited::kReached) missing.push_back(r);
  }
  if (!missing.empty()) return missing_ranks(missing, name_all, me, rules.deadline);
  if (core_.failures.failed()) return with_context(core_.failures.failure(), me);
  end_turn(turn);
  return {};
}

/// The other ranks poll rank 0's own check-in. The ranks of its host sleep on the flag that releases them.
void MonitoredBarrier::open_turn(Stamp turn) {
  kernel::PadHeader& own = members_.own_pad().header();
  signal(own.monitored_in.flag, turn);
  ring(own.monitored_out.flag);
  send_to_other_hosts(net::Kind::kMonitorIn, turn);
}

void MonitoredBarrier::end_turn(Stamp turn) {
  signal(members_.own_pad().header().monitored_out.flag, turn);
  send_to_other_hosts(net::Kind::kMonitorOut, turn);
}

void MonitoredBarrier::send_to_other_hosts(net::Kind what, Stamp turn) {
  if (!core_.port) return;
  MutexLock lock(core_.port->mutex());
  for (int r = 1; r < members_.size(); ++r) {
    if (members_.local_rank_of(r) < 0) core_.port->send(r, {what, turn});
  }
}

/// Lists the numbers of all missing ranks, and describes the first few.
Status MonitoredBarrier::missing_ranks(const std::vector<int>& missing, bool all, const std::string& me,
                                       const Deadline& deadline) const {
  std::vector<std::string> numbers, described;
  for (const int rank : missing) {
    numbers.push_back(std::to_string(rank));
    if (described.size() < kMostDescribed) described.push_back(members_.describe_awaited(rank));
  }
  if (missing.size() > kMostDescribed) described.push_back("...");
  const std::string head =
      (all ? "Ranks " : "Rank ") + joined(numbers) + " failed to pass monitoredBarrier in " + seconds(deadline);
  const std::string cycle = cycle_of_waits(members_, {missing, ""}, "monitored_barrier", deadline.start);
  const std::string rest =
      me + ", waited for " + joined(described) + (cycle.empty() ? "" : "; cycle of waits: " + cycle);
  if (!core_.failures.failed())
    return {Code::kTimeout, "nvx: " + head + "; " + rest, see_logs_of(missing.size(), "monitored_barrier(timeout=)")};
  Failure why = with_context(core_.failures.failure().failure(), rest);
  why.code = Code::kTimeout, why.reported = false;
  why.cause = head + ": " + why.cause;
  return why;
}

// --- the other ranks

Status MonitoredBarrier::follow_rank_0(const std::string& me, const WaitRules& rules) {
  if (check_in(rules) == Waited::kReached) return {};
  const std::string waited = me + ", waited " + seconds(rules.deadline) + " for " + members_.describe_awaited(0);
  if (core_.failures.failed()) return with_context(core_.failures.failure(), waited);
  return {Code::kTimeout,
          "nvx: Rank " + std::to_string(members_.rank) +
              " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
              "rank 0. Please check rank 0 logs for faulty rank; " +
              waited,
          "check that rank 0 calls it too; rank 0 names the missing ranks only if the others wait longer than it does"};
}

/// Checks in to each turn that rank 0 opens, and waits until rank 0 releases this rank from one. A check-in to a turn
/// that rank 0 has given up is harmless: rank 0 opens another one next.
Waited MonitoredBarrier::check_in(const WaitRules& rules) {
  for (;;) {
    const Turns before = turns_of(0);
    const bool joins = !reached(before.ended, before.opened);
    if (joins) join_turn(before.opened);
    const auto released = [&](const Turns& now) { return joins && reached(now.ended, before.opened); };
    const auto moved = [&](const Turns& now) { return now.opened != before.opened || released(now); };
    const Waited how = await(0, moved, rules);
    if (how != Waited::kReached || released(turns_of(0))) return how;
  }
}

MonitoredBarrier::Turns MonitoredBarrier::turns_of(int rank) const {
  if (const int s = members_.local_rank_of(rank); s >= 0) {
    const kernel::PadHeader& there = members_.pad(s).header();
    return {.opened = there.monitored_in.flag.value.load(std::memory_order_seq_cst),
            .ended = there.monitored_out.flag.value.load(std::memory_order_seq_cst)};
  }
  MutexLock lock(core_.port->mutex());
  return {.opened = core_.port->monitored_in(rank), .ended = core_.port->monitored_out()};
}

void MonitoredBarrier::join_turn(Stamp turn) {
  if (members_.local_rank_of(0) >= 0) return signal(members_.own_pad().header().monitored_in.flag, turn);
  MutexLock lock(core_.port->mutex());
  core_.port->send(0, {net::Kind::kMonitorIn, turn});
}

/// Waits until the turns of a rank meet the condition: rank 0 for check-ins, others for rank 0; or until a rank of
/// another host is lost.
Waited MonitoredBarrier::await(int rank, const std::function<bool(const Turns&)>& condition, const WaitRules& rules) {
  if (const int s = members_.local_rank_of(rank); s >= 0) {
    kernel::PadHeader& there = members_.pad(s).header();
    const auto ended = [&] { return condition(turns_of(rank)); };
    return wait(rank == 0 ? there.monitored_out.flag : there.monitored_in.flag, ended, s, rules);
  }
  net::GroupPort& port = *core_.port;
  std::optional<net::GroupPort::Departure> departure;
  const auto ended = [&] {
    port.mutex().held_by_caller();
    return condition({.opened = port.monitored_in(rank), .ended = port.monitored_out()}) ||
           (departure = port.departure(rank));
  };
  const auto check_peers = [&] { port.mutex().held_by_caller(), port.ping(rank); };
  const Waited how = port.messenger().wait(ended, check_peers, -1, rules);
  if (how != Waited::kReached || !departure) return how;
  (void)core_.failures.fail_by_departure(*departure);
  return Waited::kAlarmed;
}

}  // namespace nvx
