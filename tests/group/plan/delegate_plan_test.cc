// The collectives that nvx passes to NCCL, as a table, and the output of `nvx explain --device cuda` about them.

#include "group/plan/delegate_plan.h"

#include <gtest/gtest.h>

#include "group/device/channel_resources.h"
#include "group/device_explain.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::Collective;

const std::vector<DelegateRule> kRules{{"all_reduce", 64 * M}, {"reduce", 0}, {"broadcast", 0}};

struct ExpectedRoute {
  Collective collective;
  DType dtype;
  ReduceOp op;
  size_t bytes;
  const char* why_not;  ///< how it begins; null: delegated
};

// clang-format off
constexpr ExpectedRoute kExpected[] = {
    {Collective::kAllReduce,     DType::kF32,  ReduceOp::kSum,       64 * M,     nullptr},
    {Collective::kAllReduce,     DType::kF32,  ReduceOp::kSum,       64 * M - 1, "it is smaller"},
    {Collective::kReduce,        DType::kF32,  ReduceOp::kSum,       1,          nullptr},
    {Collective::kReduce,        DType::kF32,  ReduceOp::kSum,       0,          "there is nothing"},
    {Collective::kReduceScatter, DType::kF32,  ReduceOp::kSum,       64 * M,     "NVX_DELEGATE does not name"},
    {Collective::kAllToAll,      DType::kF32,  ReduceOp::kSum,       64 * M,     "NVX_DELEGATE does not name"},
    {Collective::kReduce,        DType::kBF16, ReduceOp::kAvg,       8,          nullptr},
    {Collective::kReduce,        DType::kF64,  ReduceOp::kProduct,   8,          nullptr},
    {Collective::kReduce,        DType::kI64,  ReduceOp::kMax,       8,          nullptr},
    {Collective::kReduce,        DType::kF16,  ReduceOp::kMax,       8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kI64,  ReduceOp::kAvg,       8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kI16,  ReduceOp::kSum,       8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kBool, ReduceOp::kSum,       8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kC64,  ReduceOp::kSum,       8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kI32,  ReduceOp::kBand,      8,          "NCCL reduces this type"},
    {Collective::kReduce,        DType::kF32,  ReduceOp::kPremulSum, 8,          "NCCL reduces this type"},
    {Collective::kBroadcast,     DType::kBool, ReduceOp::kSum,       8,          nullptr},
    {Collective::kBroadcast,     DType::kC128, ReduceOp::kBand,      8,          nullptr},
};
// clang-format on

TEST(DelegatePlan, IsTheExpectedTable) {
  for (const ExpectedRoute& e : kExpected) {
    const char* why_not = why_not_delegated({e.collective, e.dtype, e.op, e.bytes}, kRules);
    const std::string row =
        std::string(name(e.collective)) + " " + name(e.dtype) + " " + name(e.op) + " " + std::to_string(e.bytes);
    EXPECT_EQ(why_not == nullptr, e.why_not == nullptr) << row << ": " << (why_not ? why_not : "delegated");
    if (why_not && e.why_not) {
      EXPECT_TRUE(std::string(why_not).starts_with(e.why_not)) << row << ": " << why_not;
    }
  }
}

TEST(DelegatePlan, NothingIsDelegatedUnlessARuleNamesIt) {
  EXPECT_STREQ(why_not_delegated({Collective::kAllReduce, DType::kF32, ReduceOp::kSum, 64 * M}, {}),
               "NVX_DELEGATE does not name it");
}

TEST(DelegatePlan, SizeAloneDecidesOfAMessage) {
  const std::vector<DelegateRule> rules{{"all_reduce", 0}, {"send_recv", 1 * M}};
  EXPECT_TRUE(is_message_delegated(1 * M, rules));
  EXPECT_FALSE(is_message_delegated(1 * M - 1, rules));
  EXPECT_FALSE(is_message_delegated(1 * M, kRules)) << "not named";
  EXPECT_FALSE(is_message_delegated(0, std::vector<DelegateRule>{{"send_recv", 0}})) << "nothing to move";
}

std::string runs(const std::vector<Way>& ways) {
  std::string text;
  for (const Way& way : ways) {
    if (way.runs) text += way.by + " " + way.what + ";";
  }
  return text;
}

TEST(DeviceExplain, OneWayRunsAndAllAreThere) {
  PlanFacts facts;
  facts.ranks = 8;
  const auto ways = [&](size_t bytes, bool has_kernels) {
    return explain_on_device({Collective::kAllReduce, bytes, facts, has_kernels, ""});
  };
  EXPECT_EQ(runs(ways(32 << 10, true)), "kernels reduce_packets;");
  EXPECT_EQ(runs(ways(1 * M, true)), "kernels reduce_packets_two_shot;");
  EXPECT_EQ(runs(ways(2 * M, true)), "kernels reduce_chunks;");
  EXPECT_EQ(runs(ways(1 * M, false)), "host memory reduce_pipelined;");
  EXPECT_EQ(ways(1 * M, true).size(), 5u) << "NCCL, three of kernels, host memory";
  facts.force = PlanFacts::Force::kPipelined;
  EXPECT_EQ(runs(ways(8, true)), "kernels reduce_chunks;");
  for (const Way& way : ways(8, false)) {
    EXPECT_NE(way.why, "") << way.by;
    EXPECT_NE(way.set_by, "") << way.by;
  }
  EXPECT_EQ(ways(32 << 10, true).back().set_by, "NVX_ALGO, NVX_TUNE");
  EXPECT_EQ(ways(1 * M, true).back().set_by, "nothing") << "as for CPU tensors: a slot is too small";
}

/// Bytes are the input of each rank, as in explain(): a scattered piece is shorter.
TEST(DeviceExplain, CountsBytesAsThePlansDo) {
  PlanFacts facts;
  facts.ranks = 8;
  const auto runs_of = [&](Collective collective, size_t bytes) {
    return runs(explain_on_device({collective, bytes, facts, /*has_kernels=*/true, ""}));
  };
  EXPECT_EQ(bytes_of_whole(Collective::kAllGather, 100, 8), 800u);
  EXPECT_EQ(bytes_of_whole(Collective::kReduceScatter, 800, 8), 800u);
  EXPECT_EQ(bytes_of_whole(Collective::kAllReduce, 100, 8), 100u);
  const size_t held = most_bytes(kernel::DeviceAlgorithm::kReducePackets,
                                 device_shape(8, uint32_t(Tuning().of(Tune::kBlocks, 8)), pad_budget(SIZE_MAX)));
  EXPECT_EQ(runs_of(Collective::kReduceScatter, 8 * held), "kernels reduce_packets;");
  EXPECT_EQ(runs_of(Collective::kReduceScatter, 8 * held + 8), "kernels reduce_chunks;");
  EXPECT_EQ(runs_of(Collective::kAllGather, held), "kernels exchange_packets;");
  EXPECT_EQ(runs_of(Collective::kAllToAll, 8), "kernels exchange_pieces;") << "each pair knows its own";
  facts.tuning.set(Tune::kPiece, 100);
  EXPECT_EQ(runs_of(Collective::kAllGather, 101), "kernels exchange_chunks;");
  EXPECT_EQ(tuned(Tune::kPackets, facts, GpuLink::kNvlink), 1408u);
  facts.tuning.set(Tune::kPackets, 64);
  EXPECT_EQ(tuned(Tune::kPackets, facts, GpuLink::kNvlink), 64u);
  EXPECT_EQ(tuned(Tune::kLease, facts, GpuLink::kNvlink), most_lease(facts));
  EXPECT_TRUE(runs_of(Collective::kBarrier, 0).starts_with("host memory"));
}

TEST(DeviceExplain, StatesWhyThereIsNoNccl) {
  PlanFacts facts;
  facts.ranks = 2;
  const Way gathers = explain_on_device({Collective::kGather, 64 * M, facts, true, ""}).front();
  EXPECT_EQ(gathers.why, "NVX_DELEGATE cannot name it");
  EXPECT_FALSE(gathers.estimate.seconds > 0) << "it has no time";
  const auto ways = explain_on_device({Collective::kAllReduce, 64 * M, facts, true, "no delegate"});
  EXPECT_EQ(ways.front().why, "no delegate");
  EXPECT_FALSE(ways.front().runs);
  facts.ranks = 1;
  EXPECT_NE(explain_on_device({Collective::kAllReduce, 8, facts, true, ""}).front().why.find("one rank"),
            std::string::npos);
}

TEST(DeviceExplain, OverSeveralHostsKernelsHelpOrHostMemoryDoesAll) {
  PlanFacts facts;
  facts.ranks = facts.rails = 4, facts.hosts = 2, facts.world = 8;
  const auto ways = [&](Collective collective, size_t bytes, bool has_kernels) {
    return explain_on_device({collective, bytes, facts, has_kernels, ""});
  };
  EXPECT_EQ(runs(ways(Collective::kAllReduce, 64 * M, true)), "kernels and host memory between hosts ring;");
  EXPECT_EQ(runs(ways(Collective::kAllReduce, 64 * M, false)), "host memory between hosts ring;");
  EXPECT_EQ(runs(ways(Collective::kAllReduce, 8, true)).find("kernels and host memory between hosts"), 0u);
  EXPECT_EQ(runs(ways(Collective::kReduceScatter, 64 * M, true)), "kernels and host memory between hosts ring;");
  EXPECT_EQ(runs(ways(Collective::kAllGather, 64 * M, true)), "kernels and host memory between hosts direct;");
  EXPECT_EQ(runs(ways(Collective::kAllGather, 1 * M, true)), "kernels and host memory between hosts direct;");
  EXPECT_EQ(runs(ways(Collective::kBroadcast, 64 * M, true)), "host memory between hosts chain;");
  for (const Way& way : ways(Collective::kAllReduce, 1 * M, true)) {
    EXPECT_NE(way.why, "") << way.by;
    EXPECT_NE(way.set_by, "") << way.by;
  }
}

}  // namespace
}  // namespace nvx::test
