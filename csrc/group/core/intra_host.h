#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/mutex.h"
#include "group/core/core.h"
#include "group/plan/operation.h"
#include "kernel/cpu/channel.h"
#include "memory/shm/leases.h"

namespace nvx {

/// The collectives among the ranks of one host, in shared memory. Owns this rank's end of the channel and leases its
/// staging. The caller holds the group's lane, so only one thread at a time runs a stage.
class IntraHost final : public LeaseHolder {
 public:
  explicit IntraHost(Core& core);
  ~IntraHost() override;

  /// Runs a step of a call, or the call itself on one host; ranks are local. `call`: for the fingerprint and errors.
  Status run(const Operation& step, const Operation& call, const WaitRules& rules);

  /// Adds this call to the history that later steps compare, on all ranks of the host, if it had no step inside.
  void remember(const Operation& call) { channel_.remember(call.fingerprint()); }

  /// Called when this rank leaves: the last chance to report that ranks gave different roots to a collective in which
  /// they did not meet. Compares with the ranks of this host up to the last call of both, without waiting.
  void warn_of_differing_calls() const;

  /// The lease, if it is idle and no peer reads it. Any thread may call it.
  Span release_idle() override EXCLUDES(lease_mutex_);

 private:
  size_t staged_bytes(const Operation& step) const;
  kernel::CollectiveArgs args_of(const Operation& step, const Operation& call, size_t staged) const;
  std::optional<size_t> lendable(const Operation& step) const;
  void hold_lease(size_t bytes) EXCLUDES(lease_mutex_);
  Span next_part(const Choice& choice, size_t staged) EXCLUDES(lease_mutex_);
  bool read_by_all(uint32_t epoch) const;
  Status explain(const kernel::Verdict& verdict, const Operation& operation, const Deadline& deadline);
  Awaited missing_ranks();
  uint32_t mismatch_epoch(int local_rank, uint32_t epoch) const;

  Core& core_;
  const Members& members_;
  kernel::Channel channel_;

  Mutex lease_mutex_;
  Span lease_ GUARDED_BY(lease_mutex_);
  bool lease_in_use_ GUARDED_BY(lease_mutex_) = false;
  size_t lease_wanted_ GUARDED_BY(lease_mutex_) = 0;  // the least size requested when the pool gave `lease_`
  size_t lease_at_ GUARDED_BY(lease_mutex_) = 0;      // where the next operation's part begins
};

}  // namespace nvx
