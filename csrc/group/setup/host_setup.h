#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/failure.h"
#include "group/setup/group_options.h"
#include "group/setup/store.h"
#include "group/setup/topology.h"
#include "memory/shm/host_relay.h"
#include "memory/shm/shm_registry.h"

namespace nvx {

/// The process of a rank of this host, if an earlier group knows it; otherwise null.
std::shared_ptr<PeerProcess> earlier_process(const GroupOptions& options, int rank);

/// The ranks of one host in a set-up. The first rank to arrive leads the others: it watches their processes, and these
/// watch its own, so a death before the ranks know each other is noticed too. It also reads the store for the others.
class HostSetUp {
 public:
  using Value = std::vector<uint8_t>;

  /// `store` and `options` must outlive it.
  HostSetUp(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Connects to the ranks of this host in that set-up. After it, the end of this process is noticed.
  void enter(int64_t generation, const Hello& own);
  void leave();
  /// Whether another rank leads this one, and is there.
  bool follows() const { return relay_client_ && relay_client_->open(); }

  /// The relay by which the leader passes on the values that it reads from the store; null on the other ranks.
  HostRelay* relay() { return relay_.get(); }
  /// For the leader: passes a value on to the others.
  void publish(const Value& value);
  bool reads_leader() const { return follows() && !reads_itself_; }
  std::optional<Value> next(std::chrono::milliseconds span) { return relay_client_->next(span); }
  /// From now on, this rank reads the store itself: some value did not arrive.
  void read_itself() { reads_itself_ = true; }
  /// For the leader: sends the others the reason why it gives up.
  void give_up(const Failure& why);

  /// Exchanges data with the others, without blocking. Returns true if one of them has gone away since the last call;
  /// it may have left a note in the store.
  bool proceed();
  /// Why the leader has given up.
  std::optional<Failure> reason() const;
  /// Throws if the process of one of the others has ended. Logs that one is stopped.
  void check();
  /// Whether the process of a rank, as far as it is known here, has ended.
  bool has_ended(int rank) const;
  std::shared_ptr<PeerProcess> process_of(int rank) const { return earlier_process(options_, rank); }

 private:
  void check_process(const ProcessWatch& process, const PeerInfo& info);
  void check_leader();
  [[noreturn]] void throw_died(const PeerInfo& info, const ExitStatus& status);

  Store& store_;
  const GroupOptions& options_;
  int64_t generation_ = 0;
  std::unique_ptr<HostRelay> relay_;           // on the leader
  std::unique_ptr<RelayClient> relay_client_;  // on the other ranks
  PeerInfo leader_;                            // the other ranks' leader
  bool leader_was_there_ = false;              // at the last proceed()
  bool reads_itself_ = false;
};

}  // namespace nvx
