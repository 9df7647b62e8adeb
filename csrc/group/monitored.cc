// The barrier of which rank 0 says who is missing.

#include "group/group.h"

namespace nvx {

namespace {

constexpr const char* kLookAtThem =
    ". Next: look at what these ranks do; is the timeout long enough (monitored_barrier(timeout=))?";
constexpr size_t kMostDescribed = 8;

}  // namespace

/// The leading words are gloo's, which scripts know.
Status Group::monitored_barrier(std::chrono::milliseconds timeout, bool name_all) {
  NVX_TRY(check_alive());
  const WaitRules rules = this->rules(timeout, Carrier::kCaller);
  const Stamp turn = ++monitored_;
  const std::string me = "this is " + rank_name(rank()) + " in monitored_barrier of group " + name();
  if (rank() != 0) {
    if (check_in(turn, rules) == Waited::kReached) return {};
    const std::string waited = me + ", waited " + seconds(rules.deadline) + " for " + topology_.describe(0);
    if (failed()) return met_in(failure(), waited);
    return {Code::kTimeout,
            "nvx: Rank " + std::to_string(rank()) +
                " successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
                "rank 0. Please check rank 0 logs for faulty rank; " +
                waited +
                ". Next: see whether that rank has come; rank 0 names the missing only where the others wait longer "
                "than it does"};
  }
  if (timeout.count() <= 0) {
    return {Code::kTimeout, "nvx: Rank 0 timed out in monitoredBarrier after 0 ms; " + me +
                                ". Next: give it time for the others to come (monitored_barrier(timeout=))"};
  }
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
    if (seat_of(r) < 0) port_->monitor_out(r, turn);
  }
  return {};
}

/// All of them by number, and the first where they are.
Status Group::came_not(const std::vector<int>& missing, bool all, const std::string& me,
                       const Deadline& deadline) const {
  std::string numbers, described;
  for (size_t i = 0; i < missing.size(); ++i) {
    numbers += (i ? ", " : "") + std::to_string(missing[i]);
    if (i < kMostDescribed) described += (i ? ", " : "") + topology_.describe(missing[i]);
  }
  if (missing.size() > kMostDescribed) described += ", ...";
  const std::string head =
      (all ? "Ranks " : "Rank ") + numbers + " failed to pass monitoredBarrier in " + seconds(deadline);
  const std::string rest = me + ", waited for " + described;
  if (!failed()) return {Code::kTimeout, "nvx: " + head + "; " + rest + kLookAtThem};
  return met_in({Code::kTimeout, "nvx: " + head + ": " + without_name(failure().what())}, rest);
}

/// Tells rank 0, and waits to be let go.
Waited Group::check_in(Stamp turn, const WaitRules& rules) {
  if (const int s = seat_of(0); s >= 0) {
    signal(own_pad().header().monitored_in.flag, turn);
    return wait(pad(s).header().monitored_out.flag, turn, s, rules);
  }
  {
    MutexLock lock(port_->mutex());
    port_->monitor_in(0, turn);
  }
  return await_far(
      0, [&] { return port_->mutex().held_by_caller(), port_->monitored_out() >= turn; }, rules);
}

/// Waits for what a rank of another host will say, unless it is lost.
Waited Group::await_far(int rank, const std::function<bool()>& said, const WaitRules& rules) {
  std::optional<net::Port::Failure> fate;
  const auto ended = [&] {
    port_->mutex().held_by_caller();
    return said() || (fate = port_->fate(rank));
  };
  const auto look = [&] { port_->mutex().held_by_caller(), port_->ask(rank); };
  const Waited how = port_->wire().wait(ended, look, -1, rules);
  if (how != Waited::kReached || !fate) return how;
  (void)fail_by_fate(*fate);
  return Waited::kAlarmed;
}

Waited Group::await_check_in(int rank, Stamp turn, const WaitRules& rules) {
  if (const int s = seat_of(rank); s >= 0) return wait(pad(s).header().monitored_in.flag, turn, s, rules);
  return await_far(
      rank, [&] { return port_->mutex().held_by_caller(), port_->monitored_in(rank) >= turn; }, rules);
}

}  // namespace nvx
