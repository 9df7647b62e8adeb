// The algorithms chosen for GPUs, as a table: a changed threshold is a changed line here.

#include "group/plan/device_plan.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceShape;
using kernel::Piece;

constexpr size_t kPad = 8 * M;

struct ExpectedOnDevice {
  Collective collective;
  uint32_t ranks;
  size_t bytes;
  const char* algorithm;
};

// clang-format off
constexpr ExpectedOnDevice kDeviceChoices[] = {
    // collective               ranks    bytes      algorithm
    {Collective::kAllReduce,        1,      4 * K,  "reduce_packets"},
    {Collective::kAllReduce,        2,          0,  "reduce_packets"},
    {Collective::kAllReduce,        2,    512 * K,  "reduce_packets"},
    {Collective::kAllReduce,        2,  512*K + 1,  "reduce_chunks"},
    {Collective::kAllReduce,        3,     64 * K,  "reduce_packets"},
    {Collective::kAllReduce,        4,     64 * K,  "reduce_packets"},
    {Collective::kAllReduce,        4,   64*K + 1,  "reduce_packets_two_shot"},
    {Collective::kAllReduce,        4,    512 * K,  "reduce_packets_two_shot"},
    {Collective::kAllReduce,        4,  512*K + 1,  "reduce_chunks"},
    {Collective::kAllReduce,        8,     32 * K,  "reduce_packets"},
    {Collective::kAllReduce,        8,   32*K + 1,  "reduce_packets_two_shot"},
    {Collective::kAllReduce,        8,    512 * K,  "reduce_packets_two_shot"},
    {Collective::kAllReduce,        8,  512*K + 1,  "reduce_chunks"},
    {Collective::kAllReduce,       16,     16 * K,  "reduce_packets"},
    {Collective::kAllReduce,       16,   16*K + 1,  "reduce_packets_two_shot"},
    {Collective::kReduce,           8,     32 * K,  "reduce_packets"},
    {Collective::kReduce,           8,   32*K + 1,  "reduce_chunks"},
    {Collective::kReduceScatter,    8,    128 * K,  "reduce_packets"},
    {Collective::kReduceScatter,    8,  128*K + 1,  "reduce_chunks"},
    {Collective::kAllGather,        8,    128 * K,  "exchange_packets"},
    {Collective::kAllGather,        8,  128*K + 1,  "exchange_chunks"},
    {Collective::kAllGather,        2,    512 * K,  "exchange_packets"},
    {Collective::kBroadcast,        8,    128 * K,  "exchange_packets"},
    {Collective::kBroadcast,        8,     64 * M,  "exchange_chunks"},
    {Collective::kAllToAll,         8,          0,  "exchange_pieces"},
    {Collective::kAllToAll,         8,  128*K + 1,  "exchange_pieces"},
    {Collective::kGather,           8,        100,  "exchange_pieces"},
    {Collective::kScatter,          8,      1 * M,  "exchange_pieces"},
    {Collective::kBarrier,          8,          0,  "exchange_packets"},
};
// clang-format on

std::string row(Collective collective, uint32_t ranks, size_t bytes, const char* algorithm) {
  char text[128];
  std::snprintf(text, sizeof text, "%-15s %3u ranks %10zu B  %s", name(collective), ranks, bytes, algorithm);
  return text;
}

TEST(DevicePlan, IsTheExpectedTable) {
  for (const ExpectedOnDevice& e : kDeviceChoices) {
    const DeviceChoice choice = plan(e.collective, e.bytes, {.shape = device_shape(e.ranks, 16, kPad)});
    EXPECT_EQ(row(e.collective, e.ranks, e.bytes, kernel::name(choice.algorithm)),
              row(e.collective, e.ranks, e.bytes, e.algorithm));
    EXPECT_NE(std::string(choice.why), "");
  }
}

TEST(DevicePlan, TheSwitchAddsSumsBeyondOneTripIfTheRanksHaveIt) {
  DevicePlanFacts facts{.shape = device_shape(8, 16, kPad)};
  const auto of = [&](size_t bytes, DType dtype, ReduceOp op) {
    return plan_all_reduce(bytes, dtype, op, facts).algorithm;
  };
  for (const size_t bytes : {8 * K, 256 * K, 64 * M}) {
    EXPECT_EQ(of(bytes, DType::kF32, ReduceOp::kSum), plan(Collective::kAllReduce, bytes, facts).algorithm);
  }
  facts.has_multicast = true;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_EQ(of(8 * K, dtype, ReduceOp::kSum), DeviceAlgorithm::kReducePackets);
    EXPECT_EQ(of(32 * K + 1, dtype, ReduceOp::kSum), DeviceAlgorithm::kReduceMulticast);
    EXPECT_EQ(of(64 * M, dtype, ReduceOp::kSum), DeviceAlgorithm::kReduceMulticast);
    EXPECT_EQ(of(64 * M, dtype, ReduceOp::kAvg), DeviceAlgorithm::kReduceChunks);
  }
  EXPECT_EQ(of(64 * M, DType::kF64, ReduceOp::kSum), DeviceAlgorithm::kReduceChunks);
  EXPECT_EQ(of(64 * M, DType::kI32, ReduceOp::kSum), DeviceAlgorithm::kReduceChunks);
}

TEST(DevicePlan, ForcedAlgorithmRunsWherePossible) {
  const DeviceShape shape = device_shape(8, 16, kPad);
  const DevicePlanFacts one_shot{shape, PlanFacts::Force::kOneShot}, chunks{shape, PlanFacts::Force::kPipelined};
  DevicePlanFacts limited{.shape = shape}, huge{.shape = shape};
  limited.tuning.set(Tune::kOneShot, 1000);
  limited.tuning.set(Tune::kTwoShot, 4000);
  limited.tuning.set(Tune::kPiece, 100);
  huge.tuning.set(Tune::kOneShot, 64 * M);
  const auto all_reduce = [](size_t bytes, const DevicePlanFacts& facts) {
    return plan(Collective::kAllReduce, bytes, facts).algorithm;
  };
  EXPECT_EQ(all_reduce(128 * K, one_shot), DeviceAlgorithm::kReducePackets);
  EXPECT_EQ(all_reduce(128 * K + 1, one_shot), DeviceAlgorithm::kReducePacketsTwoShot);
  EXPECT_EQ(all_reduce(64 * M, one_shot), DeviceAlgorithm::kReduceChunks);
  EXPECT_EQ(all_reduce(8, chunks), DeviceAlgorithm::kReduceChunks);
  EXPECT_EQ(all_reduce(1000, limited), DeviceAlgorithm::kReducePackets);
  EXPECT_EQ(all_reduce(1001, limited), DeviceAlgorithm::kReducePacketsTwoShot);
  EXPECT_EQ(all_reduce(4000, limited), DeviceAlgorithm::kReducePacketsTwoShot);
  EXPECT_EQ(all_reduce(4001, limited), DeviceAlgorithm::kReduceChunks);
  EXPECT_EQ(plan(Collective::kReduce, 1001, limited).algorithm, DeviceAlgorithm::kReduceChunks);
  EXPECT_EQ(plan(Collective::kAllGather, 100, limited).algorithm, DeviceAlgorithm::kExchangePackets);
  EXPECT_EQ(plan(Collective::kAllGather, 101, limited).algorithm, DeviceAlgorithm::kExchangeChunks);
  EXPECT_EQ(all_reduce(128 * K + 1, huge), DeviceAlgorithm::kReducePacketsTwoShot)
      << "packets of one trip do not hold it";
  EXPECT_EQ(plan(Collective::kBroadcast, 8, chunks).algorithm, DeviceAlgorithm::kExchangeChunks);
}

TEST(DevicePlan, UnequalCountsDoNotChangeTheAlgorithm) {
  DevicePlanFacts facts{.shape = device_shape(8, 16, kPad), .force = PlanFacts::Force::kOneShot};
  const DevicePlanFacts chunks{.shape = facts.shape, .force = PlanFacts::Force::kPipelined};
  for (const Collective c : {Collective::kAllToAll, Collective::kGather, Collective::kScatter}) {
    for (const size_t bytes : {size_t(0), size_t(8), 64 * M}) {
      EXPECT_EQ(plan(c, bytes, facts).algorithm, DeviceAlgorithm::kExchangePieces) << name(c) << bytes;
      EXPECT_EQ(plan(c, bytes, chunks).algorithm, DeviceAlgorithm::kExchangeChunks) << name(c) << bytes;
    }
  }
}

/// Whether rank 0 would launch a job of so many bytes a piece.
bool can_do(DeviceAlgorithm algorithm, Collective collective, size_t bytes, const DeviceShape& shape) {
  static std::byte memory;
  const std::vector<Piece> pieces(shape.ranks, Piece{&memory, bytes});
  std::vector<Piece> table(2 * shape.ranks);
  kernel::CollectiveArgs args;
  args.call.fingerprint.collective = collective;
  args.call.fingerprint.dtype = DType::kU8;
  const bool rooted = collective == Collective::kReduce || collective == Collective::kBroadcast ||
                      collective == Collective::kGather || collective == Collective::kScatter;
  args.call.root = rooted ? 0 : -1;
  args.in = args.out = &memory;
  args.count = bytes;
  args.send = args.recv = pieces.data();
  const kernel::Job job = kernel::job_of(algorithm, args, 0, shape.ranks, 1, 0, table.data());
  return kernel::can_do(algorithm, job, shape, table.data());
}

/// The limits of the plan are those of the kernels, to the byte.
TEST(DevicePlan, PacketsHoldTheStatedSizeAndNoMore) {
  for (const DeviceShape shape : {DeviceShape{2, 1, 64, 4096}, DeviceShape{3, 5, 30, 4096}, device_shape(8, 16, kPad),
                                  device_shape(7, 3, kPad)}) {
    for (const ExpectedOnDevice& e : kDeviceChoices) {
      if (e.collective == Collective::kBarrier) continue;
      const DeviceChoice choice = plan(e.collective, e.bytes, {.shape = shape});
      EXPECT_TRUE(can_do(choice.algorithm, e.collective, e.bytes, shape)) << name(e.collective) << e.bytes;
      const DeviceAlgorithm packets = plan(e.collective, 0, {.shape = shape}).algorithm;
      if (packets == DeviceAlgorithm::kExchangePieces) continue;  // no limit on their size
      const size_t most = most_bytes(packets, shape);
      EXPECT_TRUE(can_do(packets, e.collective, most, shape)) << name(e.collective);
      EXPECT_FALSE(can_do(packets, e.collective, most + 1, shape)) << name(e.collective);
    }
    const size_t most = most_bytes(DeviceAlgorithm::kReducePacketsTwoShot, shape);
    EXPECT_TRUE(can_do(DeviceAlgorithm::kReducePacketsTwoShot, Collective::kAllReduce, most, shape));
    EXPECT_FALSE(can_do(DeviceAlgorithm::kReducePacketsTwoShot, Collective::kAllReduce, most + 1, shape));
  }
}

/// The sizes that packets are for, with the pad that a process's first group gets.
TEST(DevicePlan, PacketsHoldTheSizesThatTheyAreFor) {
  for (const uint32_t ranks : {2, 3, 4, 5, 6, 7, 8}) {
    for (const uint32_t blocks : {16, 20, 24, 32}) {
      const DevicePlanFacts facts{.shape = device_shape(ranks, blocks, pad_budget(64 * M))};
      EXPECT_NE(plan(Collective::kAllReduce, 1 * M, facts).algorithm, DeviceAlgorithm::kReduceChunks)
          << ranks << " ranks, " << blocks << " blocks";
      EXPECT_EQ(plan(Collective::kAllGather, 2 * M / ranks, facts).algorithm, DeviceAlgorithm::kExchangePackets)
          << ranks << " ranks, " << blocks << " blocks";
      EXPECT_EQ(plan(Collective::kReduceScatter, 2 * M / ranks, facts).algorithm, DeviceAlgorithm::kReducePackets)
          << ranks << " ranks, " << blocks << " blocks";
    }
  }
}

/// As many bytes as the lanes of a block load at once: fewer leave loads unused, and a round has a fixed cost.
TEST(DevicePlan, ARoundOfChunksFillsTheLanes) {
  for (const uint32_t ranks : {2, 3, 4, 5, 6, 7, 8}) {
    const auto blocks = uint32_t(Tuning().of(Tune::kBlocks, ranks));
    EXPECT_GE((ranks - 1) * device_shape(ranks, blocks, pad_budget(64 * M)).chunk_bytes, 64 * K) << ranks << " ranks";
  }
}

struct Measures {
  uint32_t ranks, blocks;
  size_t pad;
  uint32_t packets, chunk_bytes;
  size_t pad_kb;
};

TEST(DevicePlan, CutsChannelsOutAsExpected) {
  constexpr Measures kMeasures[] = {
      {1, 16, 8 * M, 8192, 64 << 10, 8198},  // the most that is ever given
      {2, 16, 8 * M, 4096, 32 << 10, 8204},  // half for chunks
      {3, 16, 8 * M, 2752, 21888, 8250},     // whole rows of 64
      {8, 16, 8 * M, 1024, 8192, 8240},      // "a few MiB"
      {8, 2, 8 * M, 8192, 64 << 10, 8198},   // a full GPU
      {16, 16, 8 * M, 512, 4096, 8288},      //
      {72, 16, 8 * M, 128, 1024, 9648},      //
      {8, 16, 512 * K, 64, 1024, 816},       // a nearly full arena
      {192, 16, 512 * K, 64, 1024, 19584},   // does not fit, and the arena reports it
  };
  for (const Measures& m : kMeasures) {
    const DeviceShape shape = device_shape(m.ranks, m.blocks, m.pad);
    EXPECT_TRUE(shape.is_valid());
    EXPECT_EQ(shape.ranks, m.ranks);
    EXPECT_EQ(shape.blocks, m.blocks);
    EXPECT_EQ(shape.packets, m.packets) << m.ranks;
    EXPECT_EQ(shape.chunk_bytes, m.chunk_bytes) << m.ranks;
    EXPECT_EQ(kernel::DevicePad{shape}.bytes() >> 10, m.pad_kb) << m.ranks;
  }
  Tuning own;
  own.set(Tune::kPad, 1 * M);
  EXPECT_EQ(pad_budget(64 * M, own), 1 * M);
  own.set(Tune::kPackets, 128);
  own.set(Tune::kChunkBytes, 64 << 10);
  const DeviceShape shape = device_shape(8, 16, 8 * M, own);
  EXPECT_TRUE(shape.is_valid());
  EXPECT_EQ(shape.packets, 128u);
  EXPECT_EQ(shape.chunk_bytes, 64u << 10);
}

TEST(DevicePlan, AnArenaServesManyGroups) {
  for (const uint32_t ranks : {2, 3, 4, 8}) {
    size_t left = 64 * M;
    int groups = 0;
    for (;; ++groups) {
      const auto blocks = uint32_t(Tuning().of(Tune::kBlocks, ranks));
      const size_t pad = kernel::DevicePad{device_shape(ranks, blocks, pad_budget(left))}.bytes();
      EXPECT_TRUE(groups > 0 || pad < 21 * M) << ranks << " ranks";
      EXPECT_TRUE(groups >= 3 || pad > 8 * M) << groups;
      if (pad > left) break;
      left -= pad;
    }
    EXPECT_GE(groups, 11) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace nvx::test
