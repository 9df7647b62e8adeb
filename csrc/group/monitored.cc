// The barrier of which rank 0 says who is missing.
//
// Only rank 0 counts the turns. It tells the others which one it has opened, and they check in to that one and to each
// that it opens while they wait: a rank that has missed a turn, or has given up waiting in one, would count others than
// rank 0 does, and be called missing for ever.

#include "group/group.h"

namespace nvx {

namespace {

constexpr const char* kLookAtThem =
    "look at what these ranks do; is the timeout long enough (monitored_barrier(timeout=))?";
constexpr size_t kMostDescribed = 8;

}  // namespace

/// The leading words are gloo's, which scripts know.
Status Group::monitored_barrier(std::chrono::milliseconds timeout, bool name_all) {
  NVX_TRY(check_alive());
  const WaitRules rules = this->rules(timeout, Carrier::kCaller);
  const std::string me = "this is " + rank_name(rank()) + " in monitored_barrier of group " + name();
  if (rank() != 0) {
    if (check_in(rules) == Waited::kReached) return {};
    const std::string waited = me + ", waited " + seconds(rules.deadline) + " for " + topology().describe(0);
    if (failed()) return met_in(failure(), waited);
    return {Code::kTimeout,
            "nvx: Rank " + std::to_string(rank()) +
                " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                "rank 0. Please check rank 0 logs for faulty rank; " +
                waited,
            "see whether that rank has come; rank 0 names the missing only where the others wait longer than it does"};
  }
  if (timeout.count() <= 0) {
    return {Code::kTimeout, "nvx: Rank 0 timed out in monitoredBarrier after 0 ms; " + me,
            "give it time for the others to come (monitored_barrier(timeout=))"};
  }
  const Stamp turn = ++monitored_;
  open_turn(turn);
  std::vector<int> missing;
  for (int r = 1; r < size() && (name_all || missing.empty()); ++r) {
    if (await_check_in(r, turn, rules) != Waited::kReached) missing.push_back(r);
  }
  if (!missing.empty()) return came_not(missing, name_all, me, rules.deadline);
  if (failed()) return met_in(failure(), me);
  signal(own_pad().header().monitored_out.flag, turn);
  if (!port_) return {};
  MutexLock lock(port_->mutex());
  for (int r = 1; r < size(); ++r) {
    if (local_rank_of(r) < 0) port_->monitor_out(r, turn);
  }
  return {};
}

/// All of them by number, and the first where they are.
Status Group::came_not(const std::vector<int>& missing, bool all, const std::string& me,
                       const Deadline& deadline) const {
  std::string numbers, described;
  for (size_t i = 0; i < missing.size(); ++i) {
    numbers += (i ? ", " : "") + std::to_string(missing[i]);
    if (i < kMostDescribed) described += (i ? ", " : "") + topology().describe(missing[i]);
  }
  if (missing.size() > kMostDescribed) described += ", ...";
  const std::string head =
      (all ? "Ranks " : "Rank ") + numbers + " failed to pass monitoredBarrier in " + seconds(deadline);
  const std::string rest = me + ", waited for " + described;
  if (!failed()) return {Code::kTimeout, "nvx: " + head + "; " + rest, kLookAtThem};
  Failure why = met_in(failure().failure(), rest);
  why.code = Code::kTimeout, why.told = false;
  why.cause = head + ": " + why.cause;
  return why;
}

/// Rank 0's own check-in is what the others look for. On its host they sleep on the flag that lets them go.
void Group::open_turn(Stamp turn) {
  kernel::PadHeader& own = own_pad().header();
  signal(own.monitored_in.flag, turn);
  ring(own.monitored_out.flag);
  if (!port_) return;
  MutexLock lock(port_->mutex());
  for (int r = 1; r < size(); ++r) {
    if (local_rank_of(r) < 0) port_->monitor_in(r, turn);
  }
}

/// Checks in to each turn that rank 0 opens, and waits to be let go from one. To check in to a turn that rank 0 has
/// given up does no harm: it opens another one next.
Waited Group::check_in(const WaitRules& rules) {
  for (;;) {
    const Turns before = turns_of_rank_0();
    const bool joins = !reached(before.ended, before.opened);
    if (joins) join_turn(before.opened);
    const auto let_go = [&](const Turns& now) { return joins && reached(now.ended, before.opened); };
    const auto moved = [&](const Turns& now) { return now.opened != before.opened || let_go(now); };
    const Waited how = await_turns(moved, rules);
    if (how != Waited::kReached || let_go(turns_of_rank_0())) return how;
  }
}

Group::Turns Group::turns_of_rank_0() const {
  if (const int s = local_rank_of(0); s >= 0) {
    const kernel::PadHeader& there = pad(s).header();
    return {.opened = there.monitored_in.flag.value.load(std::memory_order_seq_cst),
            .ended = there.monitored_out.flag.value.load(std::memory_order_seq_cst)};
  }
  MutexLock lock(port_->mutex());
  return {.opened = port_->monitored_in(0), .ended = port_->monitored_out()};
}

void Group::join_turn(Stamp turn) {
  if (local_rank_of(0) >= 0) return signal(own_pad().header().monitored_in.flag, turn);
  MutexLock lock(port_->mutex());
  port_->monitor_in(0, turn);
}

Waited Group::await_turns(const std::function<bool(const Turns&)>& moved, const WaitRules& rules) {
  if (const int s = local_rank_of(0); s >= 0)
    return wait(
        pad(s).header().monitored_out.flag, [&] { return moved(turns_of_rank_0()); }, s, rules);
  const auto moved_far = [&] {
    port_->mutex().held_by_caller();
    return moved({.opened = port_->monitored_in(0), .ended = port_->monitored_out()});
  };
  return await_far(0, moved_far, rules);
}

/// Waits for what a rank of another host will say, unless it is lost.
Waited Group::await_far(int rank, const std::function<bool()>& said, const WaitRules& rules) {
  std::optional<net::GroupPort::Fate> fate;
  const auto ended = [&] {
    port_->mutex().held_by_caller();
    return said() || (fate = port_->fate(rank));
  };
  const auto look = [&] { port_->mutex().held_by_caller(), port_->ask(rank); };
  const Waited how = port_->messenger().wait(ended, look, -1, rules);
  if (how != Waited::kReached || !fate) return how;
  (void)fail_by_fate(*fate);
  return Waited::kAlarmed;
}

Waited Group::await_check_in(int rank, Stamp turn, const WaitRules& rules) {
  if (const int s = local_rank_of(rank); s >= 0) return wait(pad(s).header().monitored_in.flag, turn, s, rules);
  return await_far(
      rank, [&] { return port_->mutex().held_by_caller(), port_->monitored_in(rank) >= turn; }, rules);
}

}  // namespace nvx
