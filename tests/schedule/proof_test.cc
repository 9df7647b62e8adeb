// Every row of the catalog, run on symbols by all ranks, under an executor that makes every permitted choice.

#include <gtest/gtest.h>

#include "support/verify.h"

namespace nvx::schedule {

void PrintTo(const Row& row, std::ostream* out) { *out << name(row.collective) << " " << row.name; }

}  // namespace nvx::schedule

namespace nvx::test {
namespace {

using schedule::catalog;
using schedule::Row;

constexpr int kMostRanks = 33;
constexpr int kDepths[] = {1, 2, 4, 16};
constexpr size_t kWidths[] = {1, 4, 16};

class Proof : public testing::TestWithParam<Row> {
 protected:
  /// With each number of steps in flight; everything else is drawn from `seed_`. All runs must give the same result.
  void prove(const ShapeRequest& request) {
    const Row& row = GetParam();
    const Shape shape = shape_of(request);
    if (!legal(row, shape)) return;
    const Script script = write_out(row, shape);
    uint64_t trees = 0;
    for (const int depth : kDepths) {
      const Conditions conditions{.depth = depth,
                                  .memory = draw() % 2 ? Memory::kShared : Memory::kApart,
                                  .timing = Timing(draw() % 3),
                                  .late = int(draw() % uint64_t(request.size + 1)) - 1,
                                  .seed = draw()};
      const Outcome outcome = run_script(script, conditions);
      ASSERT_EQ(breach(row, shape, outcome), "");
      if (depth == kDepths[0]) trees = outcome.trees;
      ASSERT_EQ(outcome.trees, trees) << "another order of combining; " << shape.text() << conditions.text();
      ++runs_;
    }
  }

  void prove_counts(ShapeRequest request) {
    const size_t n = size_t(request.size);
    for (const size_t elements : {size_t(0), size_t(1), n - 1, n, n + 1, 3 * n + 2}) {
      request.elements = elements;
      request.width = kWidths[draw() % 3];
      request.seed = draw();
      ASSERT_NO_FATAL_FAILURE(prove(request));
    }
  }

  uint64_t draw() { return mix(++drawn_, 7) >> 8; }

  uint64_t drawn_ = 0, runs_ = 0;
};

TEST_P(Proof, HoldsForAnyRanksCountsWindowsAndTimings) {
  const auto collective = GetParam().collective;
  for (int size = 1; size <= kMostRanks; ++size) {
    for (const int root : {0, size / 2, size - 1}) {
      if (root > 0 && (!has_root(collective) || (root == size / 2 && root == size - 1))) continue;
      for (const Blocks blocks : kAllBlocks) {
        if (blocks != Blocks::kEqual && !has_blocks(collective)) continue;
        prove_counts({.collective = collective, .size = size, .elements = 0, .root = root, .blocks = blocks});
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(runs_, 0u);
  RecordProperty("runs", int(runs_));
}

INSTANTIATE_TEST_SUITE_P(Catalog, Proof, testing::ValuesIn(catalog().begin(), catalog().end()), [](const auto& info) {
  return std::string(name(info.param.collective)) + "_" + info.param.name;
});

}  // namespace
}  // namespace nvx::test
