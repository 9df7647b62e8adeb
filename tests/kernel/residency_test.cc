// How many blocks the ranks of a group agree on, so that all of them are on their GPUs at once.

#include "kernel/residency.h"

#include <gtest/gtest.h>

#include <vector>

namespace nvx::test {
namespace {

using kernel::agree_on_blocks;
using kernel::BlockAgreement;
using kernel::GpuRoom;

TEST(Residency, AgreesOnTheLeastOfAllGpus) {
  struct Row {
    std::vector<GpuRoom> gpus;
    uint32_t wanted, blocks;
  };
  const Row rows[] = {
      {{{264, 1}}, 16, 16},                      // all that is wanted
      {{{264, 1}}, 264, 264},                    // just so
      {{{264, 1}}, 265, 264},                    // one too many
      {{{264, 16}}, 16, 16},                     // several ranks on one GPU
      {{{264, 17}}, 16, 15},                     // whole blocks only
      {{{264, 1}, {264, 40}, {264, 1}}, 16, 6},  // the fullest GPU decides for all
      {{{264, 2}, {100, 1}, {28, 2}}, 16, 14},   // a small one does as well
      {{{264, 264}}, 16, 1},                     // the last that fits
      {{{0, 0}, {264, 1}}, 16, 16},              // where nobody runs nothing has to fit
      {{}, 16, 16},
      {{{~0u >> 1, 1}}, ~0u, ~0u >> 1},
  };
  for (const Row& row : rows) {
    const BlockAgreement agreed = agree_on_blocks(row.gpus, row.wanted);
    EXPECT_EQ(agreed.blocks, row.blocks) << agreed.why_fewer;
    EXPECT_EQ(agreed.why_fewer.empty(), row.blocks == row.wanted);
    for (const GpuRoom& gpu : row.gpus) EXPECT_LE(uint64_t(agreed.blocks) * gpu.ranks, uint64_t(gpu.resident));
  }
}

TEST(Residency, SaysWhereNotEvenOneFits) {
  const GpuRoom crowded[] = {{264, 1}, {8, 9}};
  const BlockAgreement agreed = agree_on_blocks(crowded, 4);
  EXPECT_EQ(agreed.blocks, 0u);
  EXPECT_EQ(agreed.why_fewer,
            "GPU 1 of the group holds 8 blocks at once, and its 9 ranks need all of theirs there: not one each fits");
  const GpuRoom unable[] = {{0, 1}};
  EXPECT_EQ(agree_on_blocks(unable, 4).blocks, 0u);
  const GpuRoom odd[] = {{-1, 1}};
  EXPECT_EQ(agree_on_blocks(odd, 4).blocks, 0u);
}

TEST(Residency, CountsTheKernelThatTakesMost) {
  const kernel::KernelFacts facts[] = {{"reduction", 64, 0, 264}, {"exchange", 40, 0, 396}, {"several", 96, 0, 132}};
  EXPECT_EQ(kernel::resident_at_once(facts), 132);
  EXPECT_EQ(kernel::resident_at_once({}), 0);
}

}  // namespace
}  // namespace nvx::test
