// The barrier of which rank 0 says who is missing.

#include "group/group.h"

namespace nvx {

Status Group::monitored_barrier(std::chrono::milliseconds timeout, bool name_all) {
  NVX_TRY(check_alive());
  const WaitRules rules = this->rules(timeout, Carrier::kCaller);
  const Stamp turn = ++monitored_;
  const std::string context = "; this is rank " + std::to_string(rank()) + " in monitored_barrier of group " + name();
  if (rank() != 0) {
    if (check_in(turn, rules) == Waited::kReached) return {};
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
    if (await_check_in(r, turn, rules) == Waited::kReached) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    ++count;
    if (!name_all) break;
  }
  if (count == 0) {
    if (failed()) return failure();
    signal(own_pad().header().monitored_out.flag, turn);
    if (!port_) return {};
    MutexLock lock(port_->mutex());
    for (int r = 1; r < size(); ++r) {
      if (seat_of(r) < 0) port_->monitor_out(r, turn);
    }
    return {};
  }
  return {Code::kTimeout, std::string("nvx: ") + (count == 1 && !name_all ? "Rank " : "Ranks ") + missing +
                              " failed to pass monitoredBarrier in " + seconds(rules.deadline) +
                              (failed() ? ": " + failure().what().substr(5) + context : "")};
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
