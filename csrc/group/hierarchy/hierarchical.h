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

/// The collectives of a group whose ranks are on several hosts: what each is made of, in steps inside the host, which
/// run on the channel, and runs between hosts, which run on the port. Both overlap: who waits for a step drives the
/// runs.
///
/// The local_ranks that every host has carry what goes between hosts, each on a rail of its own; where hosts have
/// different numbers of ranks, a local_rank beyond them hands what is its own to the rail `local_rank % rails`.
class Hierarchical final : private Driver {
 public:
  /// core.port is not null.
  Hierarchical(Core& core, IntraHost& intra_host);
  ~Hierarchical() override;

  /// Runs a collective on this thread, which holds the group's lane.
  Status run(Operation& operation, Carrier carrier);
  /// Has its proxy make room for it.
  Status make_room(const Operation& operation) const;
  /// Begins what a proxy does of it; from any thread.
  Status launch(const Operation& operation) const;

 private:
  /// The operation in hand.
  struct Call {
    Operation& o;
    WaitRules rules;
    size_t width;
    net::Label label;
    Terms terms;
    kernel::ReduceFn combine = nullptr;  ///< of what the hosts have
    uint16_t runs = 0;                   ///< runs begun
  };
  /// A run that is being prepared, or on its way, with what it looks at while it is: the layout's lists of blocks,
  /// its members, and memory of its own.
  struct Active {
    net::ScheduleArgs args;
    std::vector<schedule::Block> blocks, to, from;
    std::vector<int> members;
    std::vector<char> absent;
    std::vector<std::byte> scratch, input;
    std::unique_ptr<net::ScheduleRun> run;  ///< null until it begins
  };
  /// A rank of each host, and which of them this rank is.
  struct PeerSet {
    std::vector<int> members;
    int place = 0;
  };

  void drive() override;
  std::optional<net::GroupPort::Stray> end();

  Status perform(Call& call);
  /// A part of it, in host memory.
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
  /// What the slices of a proxied operation do on their way, as long as the operation stays where it is.
  struct StagingPipeline {
    using Steps = std::function<std::vector<Operation>(size_t k)>;
    size_t slices = 0;
    size_t room = 0;           ///< bytes of a proxy's slot
    bool meets_first = false;  ///< the first round waits until all ranks have called the same
    // On the device: to host memory, back, and among the ranks of the host, where there is anything to hand out.
    Steps bring, hand_out;
    std::function<Operation(size_t k)> take_back;
    // On the host, in between: a run, which ends when `lag` younger ones have begun; or all of it, at once.
    bool carries = false;  ///< whether this rank has runs
    size_t lag = 0;
    std::function<void(Hierarchical&, Call&, size_t k)> args;
    std::function<Status(Hierarchical&, Call&, size_t k)> perform;
    std::function<kernel::Piece(size_t k)> result;  ///< what of the slot has been summed over hosts, where anything has
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

  /// A step inside the host. What is combined there is combined as the operation's terms are.
  Status stage(Call& call, Stage stage);
  /// This rank's input, ready to be combined with others': scaled, in `room`, where the operation scales.
  const std::byte* own_term(Call& call, const std::byte* in, size_t bytes, std::byte* room);
  /// Divides what all hosts are in, where the operation is an average.
  void divide(const Call& call, std::byte* data, size_t bytes) const;

  using Step = std::function<Status(size_t)>;
  /// Issues one step after the other, and retires each when kSlicesInFlight younger ones have been issued, or no more
  /// are left to issue: so much is between hosts while a host's ranks are at something else.
  static Status overlap(size_t steps, const Step& issue, const Step& retire);
  /// Where pieces lie: blocks, as offsets from the lowest of them, which is returned.
  static std::byte* lay_out(const std::vector<kernel::Piece>& pieces, std::vector<schedule::Block>& blocks);

  /// A new run of the call between these ranks. The caller says what it reads and writes, and begins it.
  Active& prepare(Call& call, const schedule::Row* row, const PeerSet& peers);
  void begin(Call& call, Active& active);
  /// Ends the run that was begun first.
  Status finish(Call& call);
  Status finish_all(Call& call);
  Status explain_stray(const Operation& o, const net::GroupPort::Stray& stray);
  Status explain(Call& call, const net::ScheduleRun& run, Waited how);

  /// How it goes between hosts.
  InterHostPlan inter_host_plan(const Operation& o) const;
  Terms terms_here(const Operation& o) const;

  PeerSet leaders() const;
  PeerSet leaders_with(int root) const;  ///< the root on its host, leaders on the others
  PeerSet rail(size_t local_rank) const;
  PeerSet others_of(int root) const;
  int rank_at(size_t host, size_t local_rank) const;  ///< -1: that host has no such local_rank
  size_t local_ranks() const { return size_t(members_.local_ranks()); }
  size_t local_rank() const { return size_t(members_.local_rank()); }
  size_t rails() const { return members_.facts.rails; }
  size_t rounds() const;  ///< how often every rail is used until each rank has been served
  /// What a rail carries of slice k of a whole, which is cut between elements; empty beyond the rails.
  kernel::Piece part_of(kernel::Piece whole, size_t slice, size_t k, size_t rail, size_t width) const;
  /// Slice k of the block of the rank that this rail stands for there in this round; empty where there is no such rank.
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
