#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "group/setup/group_options.h"
#include "group/setup/store.h"
#include "group/setup/topology.h"
#include "net/messenger.h"

namespace nvx {

/// The hosts of a group in its set-up, unless this rank knows all others from groups that exist. The ranks that lead
/// the first 128 hosts to arrive exchange addresses with the first of them before all ranks have arrived, and they ping
/// each other, so a rank that ends alone on its host is noticed too. Ranks of one host open no messenger, unless it is
/// open already, or the launcher or, if the ranks are numbered in the job, `NVX_HOST_ID` implies other hosts.
class InterHostSetUp {
 public:
  /// `store` and `options` must outlive it.
  InterHostSetUp(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Joins that set-up. `leads`: as the first rank of its host.
  void enter(int64_t generation, const Hello& own, bool leads);
  /// For waits, which call it repeatedly: opens the messenger once a second host has arrived, and connects to the
  /// others.
  void proceed();
  /// Throws if a rank to which this one has connected here is lost. Of the ranks that only an earlier group knows, it
  /// checks only `earlier`, since a check opens a connection. A rank of its own host may leave a more exact note, so a
  /// loss is thrown half a second after it was seen, unless `at_once`.
  void check(int earlier, bool at_once = false);
  /// Whether this set-up has connected to the rank.
  bool knows(int rank) const;

 private:
  Clock::duration pause() const;
  void open();
  bool connect_to(int64_t host);
  void connect(const Hello& hello, std::span<const std::byte> address);
  void ping(net::Messenger& messenger, net::PeerId peer, int rank, const std::string& place, bool at_once);
  /// Worlds of several sizes may use one store.
  std::string key(const std::string& what) const {
    return key_in(generation_, "hosts/" + std::to_string(options_.size) + "/" + what);
  }

  static constexpr const char* kCount = "count";  // of the hosts that have arrived
  static constexpr int64_t kFirst = 1;

  Store& store_;
  const GroupOptions& options_;
  Hello own_;
  int64_t generation_ = 0;
  bool searches_ = false;    // for other hosts
  int64_t host_ = 0;         // the number of this host in the order of arrival: the key of its address
  std::set<int64_t> hosts_;  // the hosts whose addresses it has read
  struct Peer {
    int rank;
    net::PeerId id;
    std::string place;  // "pid 4711, host a01"
    Clock::time_point pinged_from;
  };
  std::vector<Peer> peers_;
  std::map<int, net::PeerId> earlier_;     // the ranks that only an earlier group knows
  std::map<int, Clock::time_point> lost_;  // when the loss of a rank was seen
  std::shared_ptr<net::Messenger> messenger_;
  std::shared_ptr<bool> membership_;  // see Liveness::note_rank()
  Clock::time_point next_{};
};

/// "global rank 3", or "rank 3" if its global rank is unknown.
std::string job_name(const GroupOptions& options, int rank);
/// Throws if the text of Liveness::how_lost() is not empty: the rank is lost.
void end_if_lost(const GroupOptions& options, int rank, const std::string& how_lost);
/// The messenger of the process, if it is open.
std::shared_ptr<net::Messenger> messenger_of(const GroupOptions& options);

}  // namespace nvx
