#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/meet/group_options.h"
#include "group/meet/store.h"
#include "group/meet/topology.h"
#include "net/messenger.h"

namespace nvx {

/// The hosts of a job in the set-up of a group of all its ranks. Rank 0 and the rank that leads another host, for the
/// first 128 hosts, exchange addresses before all ranks have come, and ping each other, so a rank that ends alone on
/// its host is noticed too. A job on one host opens no messenger, unless `NVX_HOST_ID` or the launcher tells of other
/// hosts.
class FarMeeting {
 public:
  /// `store` and `options` must outlive it.
  FarMeeting(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Comes to that set-up. `leads`: as the first rank of its host.
  void enter(int64_t generation, const Hello& own, bool leads);
  /// For waits, which call it repeatedly: opens the messenger once a second host has come, and meets the others.
  void proceed();
  /// Throws if a rank that this one has met is lost.
  void look();
  bool has_met(int rank) const;

 private:
  Clock::duration pause() const;
  void open();
  void meet(const std::string& what);
  void know(const Hello& hello, std::span<const std::byte> address);
  /// Worlds of several sizes may meet over one store.
  std::string key(const std::string& what) const {
    return key_in(generation_, "hosts/" + std::to_string(options_.size) + "/" + what);
  }

  static constexpr const char* kCount = "count";  // of the hosts that have come
  static constexpr const char* kRank0 = "0";

  Store& store_;
  const GroupOptions& options_;
  Hello own_;
  int64_t generation_ = 0;
  bool looks_ = false;           // for other hosts
  std::string own_place_;        // the key of its address
  std::set<std::string> known_;  // the keys that it has read
  struct Met {
    int rank;
    net::PeerId peer;
    Clock::time_point since;
  };
  std::vector<Met> met_;
  std::shared_ptr<net::Messenger> messenger_;
  std::shared_ptr<bool> standing_;  // see Liveness::meet()
  Clock::time_point next_{};
};

/// Throws if this process has met the rank in another group and has lost it. The caller holds the messenger's lock.
void look_for_loss(net::Messenger& messenger, const GroupOptions& options, int rank);

}  // namespace nvx
