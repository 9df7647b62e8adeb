#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "group/hierarchy/host_proxy.h"
#include "group/hierarchy/rails.h"
#include "group/plan/chunks.h"
#include "group/plan/plan.h"
#include "group/plan/reduction_split.h"

namespace nvx {

/// A collective over several hosts in slices: the steps of each slice, as data. The ranks of this host do the steps of
/// `before()`, then runs exchange data between hosts, then the ranks of this host do those of `after()`. The steps are
/// operations of the ranks of this host: `root` is a `local_rank`, and `send` and `recv` have a piece for each.
///
/// `Hierarchical` drives the slices of all collectives. If the data is on devices (`Operation::proxy`), the steps are
/// kernels, and runs use slots of host memory: `d2h()` copies to a slot before the run, `h2d()` copies back after it.
class Slices {
 public:
  /// The memory of a run between hosts. `bytes`: for a run without blocks.
  struct Run {
    size_t bytes = 0;
    std::vector<schedule::Block> blocks;
    const std::byte* input = nullptr;
    std::byte* output = nullptr;
  };
  /// The operation and `rails` must stay in place.
  struct Source {
    const Operation& o;
    const Rails& rails;
    const PlanFacts& facts;
    int rank;
  };
  static constexpr size_t kSlots = kSlicesInFlight + 1;  ///< slots of slices on the CPU

  virtual ~Slices() = default;
  virtual std::vector<Operation> before(size_t) const { return {}; }
  virtual Run run(size_t k) const = 0;
  /// The sum over hosts that run k leaves in host memory; for an average, it is divided there. Empty if there is none.
  virtual kernel::Piece sum(size_t) const { return {}; }
  virtual std::vector<Operation> after(size_t) const { return {}; }
  virtual std::optional<std::vector<CopyPair>> d2h(size_t) const { return {}; }
  virtual std::vector<CopyPair> h2d(size_t) const { return {}; }
  /// On the CPU: copies from the slot to the results, after the steps of `after()`.
  virtual std::vector<CopyPair> unpack(size_t) const { return {}; }
  /// Instead of steps and runs, for device data without such kernels: a part for the host to perform in the slot.
  virtual std::optional<Operation> chunk(size_t) const { return {}; }
  /// If rails carry data for other ranks of this host: a step before all slices, and one after them.
  virtual std::optional<Operation> collect_for_rails() const { return {}; }
  virtual std::optional<Operation> return_from_rails() const { return {}; }

  size_t count() const { return cut_.chunks * rounds_; }
  size_t bytes() const { return cut_.bytes; }
  size_t slot_bytes() const { return slot_bytes_; }
  bool carries() const { return carries_; }  ///< whether this rank has runs
  bool by_kernels() const { return by_kernels_; }
  /// For slots on a device, one that forwards nothing: a GPU orders the writes of network cards for its own kernels,
  /// not for a card that sends a block on.
  const schedule::Row* row() const {
    const bool on_device = o_.proxy && o_.proxy->on_device();
    return on_device ? schedule::find(schedule::Collective::kAllGather, "direct") : plan_.row;
  }
  /// Whether the host, which drives the slices, reads and writes no data of theirs.
  virtual bool moves_only() const { return false; }
  const PeerSet& peers() const { return peers_; }
  int root() const { return root_; }  ///< its host; the root of runs

  /// On the CPU: the memory that the steps and runs need besides the operation's own.
  size_t scratch_bytes() const { return std::min(count(), kSlots) * slot_bytes_ + kept_; }
  void use(std::byte* scratch) { scratch_ = scratch; }

 protected:
  explicit Slices(const Source& source);
  void cut_by(size_t slice, size_t bytes);
  std::byte* at(size_t k) const;  ///< slot of slice k
  /// A rank that is alone on its host needs no step for the host's sum, if the terms are not scaled.
  bool reads_input() const { return rails_.alone() && !split_.scales() && !o_.proxy; }
  std::byte* kept() const { return scratch_ + std::min(count(), kSlots) * slot_bytes_; }
  size_t width() const { return size_of(o_.dtype); }
  Operation step_of(kernel::Collective collective) const;
  Operation sum_of() const;

  const Operation& o_;
  const Rails& rails_;
  const PlanFacts& facts_;
  const int rank_;
  const InterHostPlan plan_;
  const ReductionSplit split_;
  PeerSet peers_;
  int root_ = 0;
  bool carries_ = false;
  bool by_kernels_ = o_.proxy != nullptr;  ///< the steps inside the host are kernels
  Cut cut_;
  size_t rounds_ = 1;
  size_t slot_bytes_ = 0;
  size_t kept_ = 0;  ///< bytes of results that stay until the end
  std::byte* scratch_ = nullptr;
};

/// For all_reduce, reduce, reduce_scatter, all_gather and broadcast; for data on devices, for every collective.
std::unique_ptr<Slices> slices_of(const Slices::Source& source);

/// Returns the lowest address of the pieces, and lists the pieces as blocks, as offsets from that address.
std::byte* lay_out(const std::vector<kernel::Piece>& pieces, std::vector<schedule::Block>& blocks);

}  // namespace nvx
