// The slices of collectives over several hosts, as data: those that `nvx explain` shows, and of the whole operation.

#include "group/hierarchy/slices.h"

#include <gtest/gtest.h>

namespace nvx {
namespace {

using kernel::Collective;

constexpr size_t K = 1 << 10, M = 1 << 20;

Members members_of(int rank, const std::vector<int>& ranks_by_host) {
  std::vector<Hello> hellos;
  for (size_t host = 0; host < ranks_by_host.size(); ++host) {
    for (int i = 0; i < ranks_by_host[host]; ++i)
      hellos.push_back(describe_self(int(hellos.size()), "host" + std::to_string(host)));
  }
  Members members;
  members.rank = rank;
  members.topology = Topology::from(hellos);
  members.facts = facts_of(members.topology, rank);
  members.memory.resize(members.ranks_of_host().size());
  return members;
}

/// An operation of floats with this many bytes, counted as for `plan_between()`, and its memory.
struct Made {
  Made(Collective collective, size_t bytes, size_t ranks) : memory(bytes * ranks) {
    o.collective = collective, o.dtype = DType::kF32, o.root = 0;
    o.in = o.out = memory.data(), o.count = bytes / 4;
    if (collective == Collective::kReduceScatter) o.send = pieces(bytes / ranks, ranks);
    if (collective == Collective::kAllGather) o.recv = pieces(bytes, ranks);
    if (collective != Collective::kBroadcast) return;
    o.recv = Pieces(ranks);
    for (size_t r = 0; r < ranks; ++r) o.recv[r] = {memory.data(), bytes};
  }
  Pieces pieces(size_t bytes, size_t ranks) {
    Pieces all(ranks);
    for (size_t r = 0; r < ranks; ++r) all[r] = {memory.data() + r * bytes, bytes};
    return all;
  }
  std::vector<std::byte> memory;
  Operation o;
};

/// The bytes that a step puts into one rank's slot, or stages in total.
size_t staged_by(const Operation& step) {
  switch (step.collective) {
    case Collective::kReduce: return step.count * 4;
    case Collective::kReduceScatter: return step.send.longest() * step.send.size();
    default: return step.recv.longest();
  }
}

TEST(Slices, AreThoseThatThePlanExplains) {
  for (const auto& hosts : {std::vector<int>{2, 2}, {3, 3, 3}}) {
    const Members members = members_of(0, hosts);
    const Rails rails(members);
    for (const Collective collective : {Collective::kAllReduce, Collective::kReduce, Collective::kReduceScatter,
                                        Collective::kAllGather, Collective::kBroadcast}) {
      for (const size_t bytes : {36 * K, size_t(9) * 256 * K, 9 * M}) {
        SCOPED_TRACE(std::string(name(collective)) + " " + std::to_string(bytes));
        const Made made(collective, bytes, size_t(members.size()));
        const auto slices = slices_of({made.o, rails, members.facts, members.rank});
        std::vector<std::byte> scratch(slices->scratch_bytes());
        slices->use(scratch.data());
        const schedule::Collective between = across(collective);
        const InterHostPlan plan = plan_between(between, bytes, members.facts);
        const Sizes size = sizes(between, bytes, plan, members.facts);
        EXPECT_EQ(slices->row(), plan.row);
        EXPECT_EQ(slices->count(), ceil_div(size.sliced, plan.slice));
        ASSERT_EQ(slices->before(0).empty(), plan.before == Collective::kNone);
        ASSERT_EQ(slices->after(0).empty(), plan.after == Collective::kNone);
        for (const Operation& step : slices->before(0)) EXPECT_EQ(staged_by(step), size.before);
        for (const Operation& step : slices->after(0)) EXPECT_EQ(staged_by(step), size.after);
      }
    }
  }
}

TEST(Slices, OfAllRailsCoverTheWhole) {
  const std::vector<int> hosts{3, 2};
  size_t reduced = 0, gathered = 0, scattered = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const Members members = members_of(rank, hosts);
    const Rails rails(members);
    const auto sum_runs = [&](Collective collective, size_t bytes, const auto& of) {
      const Made made(collective, bytes, 5);
      const auto slices = slices_of({made.o, rails, members.facts, rank});
      std::vector<std::byte> scratch(slices->scratch_bytes());
      slices->use(scratch.data());
      size_t total = 0;
      for (size_t k = 0; k < slices->count() && slices->carries(); ++k) total += of(slices->run(k));
      return total;
    };
    const auto blocks = [](const Slices::Run& run) { return schedule::total(run.blocks); };
    reduced += sum_runs(Collective::kAllReduce, 5 * M, [](const Slices::Run& run) { return run.bytes; });
    scattered += sum_runs(Collective::kReduceScatter, 5 * M, blocks);
    gathered += sum_runs(Collective::kAllGather, M, blocks);
  }
  EXPECT_EQ(reduced, 5 * M);
  EXPECT_EQ(scattered, 5 * M);
  EXPECT_EQ(gathered, 5 * M);
}

}  // namespace
}  // namespace nvx
