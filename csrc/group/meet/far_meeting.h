#pragma once

#include <cstdint>
#include <map>
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

/// The hosts of a job in the set-up of a group of all its ranks, or of ranks whose global ranks are not known: these
/// may have met in no other group. Rank 0 and the rank that leads another host, for the first 128 hosts, exchange
/// addresses before all ranks have come, and ping each other, so a rank that ends alone on its host is noticed too.
/// Ranks of one host open no messenger, unless the launcher tells of other hosts, or `NVX_HOST_ID` for the whole job.
class FarMeeting {
 public:
  /// `store` and `options` must outlive it.
  FarMeeting(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Comes to that set-up. `leads`: as the first rank of its host.
  void enter(int64_t generation, const Hello& own, bool leads);
  /// For waits, which call it repeatedly: opens the messenger once a second host has come, and meets the others.
  void proceed();
  /// Throws if a rank that this one has met is lost. Of the ranks that only an earlier group has met, it checks only
  /// `known`, since a check opens a connection.
  void look(int known);
  bool has_met(int rank) const;

 private:
  Clock::duration pause() const;
  void open();
  void meet(const std::string& what);
  void know(const Hello& hello, std::span<const std::byte> address);
  void ask(net::Messenger& messenger, net::PeerId peer, int rank, const std::string& place);
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
    std::string place;  // "pid 4711, host a01"
    Clock::time_point since;
  };
  std::vector<Met> met_;
  std::map<int, net::PeerId> asked_;  // the ranks that only an earlier group has met
  std::shared_ptr<net::Messenger> messenger_;
  std::shared_ptr<bool> standing_;  // see Liveness::meet()
  Clock::time_point next_{};
};

/// "global rank 3", or "rank 3" if its global rank is unknown.
std::string job_name(const GroupOptions& options, int rank);
/// Throws if this text, the rank's fate according to Liveness, says that the rank is lost.
void end_if_lost(const GroupOptions& options, int rank, const std::string& fate);
/// The messenger of the process, if it is open.
std::shared_ptr<net::Messenger> messenger_of(const GroupOptions& options);

}  // namespace nvx
