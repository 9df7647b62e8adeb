#pragma once

#include <cstddef>
#include <cstdint>

#include "base/mutex.h"
#include "group/core/core.h"
#include "group/plan/operation.h"
#include "kernel/cpu/channel.h"
#include "memory/shm/leases.h"

namespace nvx {

/// One step of a collective inside a host, as the kernels see it: `root` and pieces by `local_rank`.
struct Stage {
  kernel::Collective collective = kernel::Collective::kNone;  ///< the row of the plan
  int root = -1;
  size_t bytes = 0;  ///< the question to the plan
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;
  const kernel::Piece* send = nullptr;
  const kernel::Piece* recv = nullptr;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  ///< for kPremulSum: the factor of this rank's elements
};

/// The collectives among the ranks of one host, in shared memory. Owns this rank's end of the channel and leases its
/// staging. The caller holds the group's lane, so only one thread at a time runs a stage.
class IntraHost final : public LeaseHolder {
 public:
  explicit IntraHost(Core& core);
  ~IntraHost() override;
  IntraHost(const IntraHost&) = delete;
  IntraHost& operator=(const IntraHost&) = delete;

  /// A whole operation, if all ranks are on one host.
  Status run(const Operation& operation, const WaitRules& rules);
  /// `operation`: the user's call, for the fingerprint and for errors.
  Status run_stage(const Stage& stage, const Operation& operation, const WaitRules& rules);

  /// Called when this rank leaves. Ranks that gave different roots to a collective may not have met in it, and find out
  /// at their next call. Without a next call this is the last chance to report it. Compares with the ranks of this host
  /// up to the last call of both, without waiting.
  void warn_of_differing_calls() const;

  /// The lease, if it is idle and no peer reads it. Any thread may call it.
  Span yield() override EXCLUDES(lease_mutex_);

 private:
  size_t staged_bytes(const Operation& operation) const;
  void hold_lease(size_t bytes) EXCLUDES(lease_mutex_);
  void rest_lease() EXCLUDES(lease_mutex_);
  bool read_by_all(uint32_t epoch) const;
  Status explain(const kernel::Verdict& verdict, const Operation& operation, const Deadline& deadline);
  Awaited missing_ranks();
  uint32_t where_they_parted(int local_rank, uint32_t epoch) const;

  Core& core_;
  const Members& members_;
  kernel::Channel channel_;

  Mutex lease_mutex_;
  Span lease_ GUARDED_BY(lease_mutex_);
  bool lease_in_use_ GUARDED_BY(lease_mutex_) = false;
  size_t lease_wanted_ GUARDED_BY(lease_mutex_) = 0;  // the size requested when the pool gave `lease_`
};

}  // namespace nvx
