#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "group/core/core.h"

namespace nvx {

/// The barrier in which rank 0 names the missing ranks.
///
/// Only rank 0 counts turns. It announces the turn that it opens, and the others check in to that turn and to every
/// later one that it opens while they wait. If the others counted too, a rank that missed a turn, or gave up waiting in
/// one, would have a different count from then on, and rank 0 would always report it as missing.
class MonitoredBarrier {
 public:
  explicit MonitoredBarrier(Core& core) : core_(core), members_(core.members) {}

  /// `timeout`: on rank 0, for the others; 0 is an error there. `name_all`: wait for every rank and name all missing
  /// ones, not only the first. The group stays usable after a timeout.
  Status run(std::chrono::milliseconds timeout, bool name_all);

  /// Waits, at most this long, until no other thread is in run().
  void settle(std::chrono::milliseconds most) const;

 private:
  /// The last turn that rank 0 opened or this rank checked in to, and the last from which rank 0 released all ranks.
  struct Turns {
    Stamp opened = 0, ended = 0;
  };
  Status watch_others(const std::string& me, const WaitRules& rules, bool name_all);
  Status follow_rank_0(const std::string& me, const WaitRules& rules);
  void open_turn(Stamp turn);
  void end_turn(Stamp turn);
  void send_to_other_hosts(net::Kind what, Stamp turn);
  Status missing_ranks(const std::vector<int>& missing, bool all, const std::string& me,
                       const Deadline& deadline) const;
  Waited check_in(const WaitRules& rules);
  Turns turns_of(int rank) const;
  void join_turn(Stamp turn);
  Waited await(int rank, const std::function<bool(const Turns&)>& condition, const WaitRules& rules);

  Core& core_;
  const Members& members_;
  uint64_t begun_ = 0;           // turns that rank 0 has begun
  std::atomic<int> running_{0};  // threads in run()
};

}  // namespace nvx
