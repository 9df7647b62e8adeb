// The number of blocks on which the ranks of a group agree, so that all are resident at once.

#include "kernel/gpu/residency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace nvx::test {
namespace {

using kernel::agree_on_blocks;
using kernel::BlockAgreement;
using kernel::GpuCapacity;

TEST(Residency, AgreesOnTheLeastShareOfAllGpus) {
  struct Row {
    std::vector<GpuCapacity> gpus;
    uint32_t wanted, blocks;
  };
  const Row rows[] = {
      {{{264, 1}}, 16, 16},                      // as many as wanted
      {{{264, 1}}, 66, 66},                      // exactly a quarter
      {{{264, 1}}, 67, 66},                      // one too many
      {{{264, 4}}, 16, 16},                      // several ranks on one GPU
      {{{264, 5}}, 16, 13},                      // whole blocks only
      {{{264, 1}, {264, 10}, {264, 1}}, 16, 6},  // the GPU with the least room decides for all
      {{{264, 2}, {100, 1}, {28, 2}}, 16, 3},    // a small GPU decides too
      {{{264, 67}}, 16, 1},                      // a quarter is less than one block per rank: one block per rank
      {{{264, 264}}, 16, 1},                     // the last one that fits
      {{{264, 265}}, 16, 0},
      {{{264, 1, 200}}, 16, 16},  // beside other groups: a quarter of the rest
      {{{264, 1, 204}}, 16, 15},
      {{{264, 8, 256}}, 16, 1},  // the whole rest
      {{{264, 8, 257}}, 16, 0},
      {{{264, 1, 0, 4}}, 17, 16},  // a process of several has its part
      {{{264, 1, 65, 4}}, 16, 1},
      {{{264, 1, 66, 4}}, 16, 0},
      {{{3, 1, 0, 4}}, 16, 0},
      {{{264, 1, ~0u}}, 16, 0},      // a value from a peer can be anything
      {{{0, 0}, {264, 1}}, 16, 16},  // a GPU without ranks needs no room
      {{}, 16, 16},
      {{{~0u >> 1, 1}}, ~0u, ~0u >> 3},
  };
  for (const Row& row : rows) {
    const BlockAgreement agreed = agree_on_blocks(row.gpus, row.wanted);
    EXPECT_EQ(agreed.blocks, row.blocks) << agreed.why_fewer;
    EXPECT_EQ(agreed.why_fewer.empty(), row.blocks == row.wanted);
    for (const GpuCapacity& gpu : row.gpus) {
      EXPECT_LE(uint64_t(agreed.blocks) * gpu.ranks,
                uint64_t(gpu.resident) - std::min(gpu.reserved, uint32_t(gpu.resident)));
    }
  }
}

/// One group after another on one GPU, none of which ends: the blocks that each of its ranks gets.
std::vector<uint32_t> groups_on(int resident, uint32_t ranks, uint32_t wanted, uint32_t processes = 1) {
  std::vector<uint32_t> blocks;
  for (GpuCapacity room{resident, ranks, 0, processes};; room.reserved += blocks.back() * ranks) {
    const BlockAgreement agreed = agree_on_blocks({&room, 1}, wanted);
    if (agreed.blocks == 0) return blocks;
    blocks.push_back(agreed.blocks);
  }
}

TEST(Residency, LeavesRoomForLaterGroups) {
  using Blocks = std::vector<uint32_t>;
  EXPECT_EQ(groups_on(132, 1, 16), (Blocks{16, 16, 16, 16, 16, 13, 9, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(groups_on(132, 8, 16), (Blocks{4, 3, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(groups_on(40, 1, 16), (Blocks{10, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(groups_on(3, 2, 16), (Blocks{1}));
  EXPECT_EQ(groups_on(132, 1, 16, 2), (Blocks{16, 12, 9, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(groups_on(132, 1, 16, 4), (Blocks{8, 6, 4, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(groups_on(132, 1, 16, 8), (Blocks{4, 3, 2, 1, 1, 1, 1, 1, 1, 1}));
}

TEST(Residency, ReportsWhereNotEvenOneFits) {
  const GpuCapacity crowded[] = {{264, 1}, {8, 9}};
  const BlockAgreement agreed = agree_on_blocks(crowded, 4);
  EXPECT_EQ(agreed.blocks, 0u);
  EXPECT_EQ(agreed.why_fewer,
            "GPU 1 of the group holds 8 blocks at once; its 9 ranks need all of their blocks there at once: not even "
            "one per rank fits");
  const GpuCapacity reserved[] = {{132, 8, 128}};
  EXPECT_EQ(agree_on_blocks(reserved, 4).why_fewer,
            "GPU 0 of the group holds 132 blocks at once; 128 of them are reserved for other groups; its 8 ranks "
            "need all of their blocks there at once: not even one per rank fits");
  const GpuCapacity parts[] = {{132, 1, 33, 4}};
  EXPECT_EQ(agree_on_blocks(parts, 4).why_fewer,
            "GPU 0 of the group holds 132 blocks at once; 33 of them for each of 4 processes; 33 of them are reserved "
            "for other groups; a process's rank needs all of its blocks there at once: not even one per rank fits");
  const GpuCapacity less[] = {{16, 1}};
  EXPECT_EQ(
      agree_on_blocks(less, 16).why_fewer,
      "GPU 0 of the group holds 16 blocks at once; its rank needs all of its blocks there at once: 4 per rank, so that "
      "later groups find some too");
  const GpuCapacity unable[] = {{0, 1}};
  EXPECT_EQ(agree_on_blocks(unable, 4).blocks, 0u);
  const GpuCapacity odd[] = {{-1, 1}};
  EXPECT_EQ(agree_on_blocks(odd, 4).blocks, 0u);
}

TEST(Residency, CountsTheKernelThatTakesMost) {
  const kernel::KernelAttributes attributes[] = {
      {"reduction", 64, 0, 264}, {"exchange", 40, 0, 396}, {"several", 96, 0, 132}};
  EXPECT_EQ(kernel::resident_at_once(attributes), 132);
  EXPECT_EQ(kernel::resident_at_once({}), 0);
}

}  // namespace
}  // namespace nvx::test
