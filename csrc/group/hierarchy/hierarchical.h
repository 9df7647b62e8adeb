#pragma once

#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "group/core/core.h"
#include "group/core/intra_host.h"
#include "group/hierarchy/host_proxy.h"
#include "group/hierarchy/rails.h"
#include "group/hierarchy/slices.h"
#include "net/executor.h"

namespace nvx {

/// The collectives of a group whose ranks are on several hosts. Each consists of steps inside the host, on the channel,
/// and of runs between hosts, on the port. The two overlap: a thread that waits for a step drives the runs.
class Hierarchical final : private Driver {
 public:
  /// `core.port` must not be null.
  Hierarchical(Core& core, IntraHost& intra_host);
  ~Hierarchical() override;

  /// Runs a collective on this thread, which holds the group's lane.
  Status run(Operation& operation, const WaitRules& rules);
  /// Allocates the memory that the operation's proxy needs.
  Status reserve_slots(const Operation& operation) const;
  /// Begins the proxy's part of the operation. Any thread may call it.
  Status launch(const Operation& operation) const;

 private:
  struct Call {
    Operation& o;
    WaitRules rules;
    net::FingerprintBytes fingerprint;
    ReductionSplit split;
    kernel::ReduceFn combine = nullptr;  ///< combines the terms of the hosts
    uint16_t runs = 0;                   ///< runs begun
  };
  /// A run that is prepared or in flight, with the lists and the memory to which it refers.
  struct Active {
    net::ScheduleArgs args;
    std::vector<schedule::Block> blocks, to, from;
    std::vector<int> members;
    std::vector<char> absent;
    std::vector<std::byte> scratch, input;
    std::optional<net::ScheduleRun> run;  ///< empty until it begins
  };

  void drive() override;
  std::optional<net::CallFingerprints::Theirs> end();

  Status perform(Call& call);
  std::unique_ptr<Slices> slices(const Operation& o) const { return slices_of({o, rails_, facts_, members_.rank}); }
  Status run_slices(Call& call);
  Status run_proxy(Call& call);
  /// Issues the slices in order. Retires a slice when `lag` younger ones have been issued, or none is left to issue: so
  /// `lag` slices are between hosts while the ranks of a host work on the next one. `issue(k)`: before the run of slice
  /// k; `retire(k)`: after it.
  Status overlap(Call& call, const Slices& slices, size_t lag, const auto& issue, const auto& retire) {
    for (size_t k = 0; k < slices.count() + lag; ++k) {
      if (k < slices.count()) {
        NVX_TRY(issue(k));
        if (slices.carries()) begin(call, slices, k);
      }
      if (k < lag || k - lag >= slices.count()) continue;
      if (slices.carries()) {
        NVX_TRY(finish(call));
        divide(call, slices.sum(k - lag));
      }
      NVX_TRY(retire(k - lag));
    }
    return {};
  }
  Status perform_chunk(Call& call, Operation chunk, size_t bytes);
  Status to_or_from_root(Call& call);
  Status all_to_all(Call& call);
  Status exchange_inside(Call& call);
  Status barrier(Call& call);

  Status run_inside(Call& call, const Operation& step);
  /// For an average: divides the sum over all hosts.
  void divide(const Call& call, const kernel::Piece& sum) const;

  /// Creates a run of the call between these ranks. The caller sets its input and output, and begins it.
  Active& prepare(Call& call, const schedule::Row* row, const PeerSet& peers);
  void begin(Call& call, Active& active);
  void begin(Call& call, const Slices& slices, size_t k);
  Status finish(Call& call);
  void put_aside(std::list<Active>::iterator ended);
  Status finish_all(Call& call);
  Status explain_late_call(const Operation& o, const net::CallFingerprints::Theirs& late);
  Status explain(Call& call, const net::ScheduleRun& run, Waited how);

  Core& core_;
  const Members& members_;
  const PlanFacts& facts_;
  IntraHost& intra_host_;
  net::GroupPort& port_;
  const Rails rails_;
  uint32_t op_ = 0;
  std::list<Active> active_;
  std::list<Active> spare_;  ///< those that have ended, for later runs
  std::vector<std::byte> scratch_;
};

}  // namespace nvx
