#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "group/core/core.h"
#include "group/core/intra_host.h"
#include "group/hierarchy/host_proxy.h"
#include "group/plan/chunks.h"
#include "group/plan/terms.h"
#include "net/executor.h"

namespace nvx {

/// The collectives of a group whose ranks are on several hosts. Each consists of steps inside the host, on the channel,
/// and of runs between hosts, on the port. The two overlap: a thread that waits for a step drives the runs.
///
/// Each `local_rank` that every host has is a rail, which carries a part of the data between hosts. If hosts have
/// different numbers of ranks, a higher `local_rank` hands its data to the rail `local_rank % rails`.
class Hierarchical final : private Driver {
 public:
  /// `core.port` must not be null.
  Hierarchical(Core& core, IntraHost& intra_host);
  ~Hierarchical() override;

  /// Runs a collective on this thread, which holds the group's lane.
  Status run(Operation& operation, Carrier carrier);
  /// Allocates the memory that the operation's proxy needs.
  Status make_room(const Operation& operation) const;
  /// Begins the proxy's part of the operation. Any thread may call it.
  Status launch(const Operation& operation) const;

 private:
  /// The current operation.
  struct Call {
    Operation& o;
    WaitRules rules;
    size_t width;
    net::Label label;
    Terms terms;
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
    std::unique_ptr<net::ScheduleRun> run;  ///< null until it begins
  };
  /// One rank of each host; `members[place]` is this rank.
  struct PeerSet {
    std::vector<int> members;
    int place = 0;
  };

  void drive() override;
  std::optional<net::CallLabels::Theirs> end();

  Status perform(Call& call);
  /// Performs a part of the call's operation, in host memory.
  Status perform(Call& call, Operation& part);
  Status all_reduce(Call& call);
  Status all_reduce_by_leader(Call& call, const InterHostPlan& inter_host);
  Status all_reduce_on_rails(Call& call, const InterHostPlan& inter_host);
  Status reduce(Call& call);
  Status broadcast(Call& call);
  Status all_gather(Call& call);
  Status reduce_scatter(Call& call);
  enum class Direction { kToRoot, kFromRoot };
  Status to_or_from_root(Call& call, Direction direction);
  Status all_to_all(Call& call);
  Status barrier(Call& call);
  Status sum_round(Call& call, const InterHostPlan& inter_host, const Cut& cut, size_t round, size_t k,
                   std::byte* result);
  /// The stages of a proxied operation's slices. Refers to the operation, which must stay in place.
  struct StagingPipeline {
    using Steps = std::function<std::vector<Operation>(size_t k)>;
    size_t slices = 0;
    size_t room = 0;           ///< bytes of a slot of the proxy
    bool meets_first = false;  ///< the first round waits until all ranks have called the same
    // On the device: copies to host memory, copies back, and the exchange inside the host, if there is one.
    Steps bring, hand_out;
    std::function<Operation(size_t k)> take_back;
    // On the host, in between: a run that ends when `lag` younger ones have begun, or the whole slice at once.
    bool carries = false;  ///< whether this rank has runs
    size_t lag = 0;
    std::function<void(Hierarchical&, Call&, size_t k)> args;
    std::function<Status(Hierarchical&, Call&, size_t k)> perform;
    std::function<kernel::Piece(size_t k)> result;  ///< the part of the slot that holds a sum over hosts, if any
  };
  static size_t rounds_of(const StagingPipeline& way);
  StagingPipeline pipeline(const Operation& o) const;
  static StagingPipeline way_of_kernels(bool carries);
  StagingPipeline way_by_the_host(const Operation& o) const;
  StagingPipeline way_of_all_reduce(const Operation& o) const;
  StagingPipeline way_of_small_all_reduce(const Operation& o, const InterHostPlan& inter_host) const;
  StagingPipeline way_of_reduce_scatter(const Operation& o) const;
  StagingPipeline way_of_all_gather(const Operation& o) const;
  Status run_proxy(Call& call);
  const std::byte* lay_out_terms(Call& call, Active& active, const std::vector<kernel::Piece>& terms);
  Status deliver_beyond_rails(Call& call, const std::function<std::byte*(size_t round)>& result);
  Status lend_to_rails(Call& call);
  Status tell_packed(Call& call, const std::function<kernel::Piece(size_t host, size_t local_rank)>& block);
  void set_apart(Operation& o, std::vector<std::byte>& room) const;
  Status exchange_inside(Call& call, kernel::Collective collective, int root_local_rank);

  /// A step inside the host. It combines with the operator of the call's terms.
  Status stage(Call& call, Stage stage);
  /// This rank's input as a term: scaled into `room` if the operation scales, otherwise `in`.
  const std::byte* own_term(Call& call, const std::byte* in, size_t bytes, std::byte* room);
  /// For an average: divides the sum over all hosts.
  void divide(const Call& call, std::byte* data, size_t bytes) const;

  using Step = std::function<Status(size_t)>;
  /// Issues the steps in order. Retires a step when kSlicesInFlight younger ones have been issued, or none is left to
  /// issue: up to kSlicesInFlight slices are between hosts while the ranks of a host work on the next one.
  static Status overlap(size_t steps, const Step& issue, const Step& retire);
  /// Returns the lowest address of the pieces, and lists the pieces as blocks, as offsets from that address.
  static std::byte* lay_out(const std::vector<kernel::Piece>& pieces, std::vector<schedule::Block>& blocks);

  /// Creates a run of the call between these ranks. The caller sets its input and output, and begins it.
  Active& prepare(Call& call, const schedule::Row* row, const PeerSet& peers);
  void begin(Call& call, Active& active);
  /// Ends the oldest run.
  Status finish(Call& call);
  Status finish_all(Call& call);
  Status explain_late_label(const Operation& o, const net::CallLabels::Theirs& late_label);
  Status explain(Call& call, const net::ScheduleRun& run, Waited how);

  InterHostPlan inter_host_plan(const Operation& o) const;
  Terms terms_here(const Operation& o) const;

  PeerSet leaders() const;
  PeerSet leaders_with(int root) const;  ///< the root on its host, leaders on the others
  PeerSet rail(size_t local_rank) const;
  PeerSet others_of(int root) const;
  int rank_at(size_t host, size_t local_rank) const;  ///< -1 if the host has no such `local_rank`
  size_t local_ranks() const { return size_t(members_.local_ranks()); }
  size_t local_rank() const { return size_t(members_.local_rank()); }
  size_t rails() const { return members_.facts.rails; }
  size_t rounds() const;  ///< rounds until every rail has served each of its ranks
  /// The rail's part of slice k, cut between elements. Empty if the `local_rank` is not a rail.
  kernel::Piece part_of(kernel::Piece whole, size_t slice, size_t k, size_t rail, size_t width) const;
  /// Slice k of the block of the rank that this rail serves on that host in this round. Empty if there is no such rank.
  kernel::Piece slice_of(const Pieces& blocks, const Cut& cut, size_t k, size_t host, size_t round, size_t rail) const;
  bool carries() const { return local_rank() < rails(); }
  std::byte* room(size_t bytes);

  Core& core_;
  const Members& members_;
  IntraHost& intra_host_;
  net::GroupPort& port_;
  const size_t host_;
  uint32_t op_ = 0;
  std::deque<std::unique_ptr<Active>> active_;
  std::vector<std::byte> room_;
};

}  // namespace nvx
