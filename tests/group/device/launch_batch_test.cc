// Which operations may go in one launch.

#include "group/device/launch_batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace nvx {
namespace {

using kernel::Job;
using kernel::Piece;
using Kind = kernel::Pieces::Kind;

std::byte memory[4096];

Job job(size_t read, size_t written, size_t bytes) {
  Job job;
  job.send = {Kind::kSame, 0, memory + read, bytes};
  job.recv = {Kind::kSame, 0, memory + written, bytes};
  return job;
}

bool add(LaunchBatch& batch, const Job& job, size_t pieces = 0) {
  return batch.add(pieces, [&](uint32_t, Piece*) { return job; });
}

TEST(LaunchBatch, TakesWhatIsApart) {
  const struct {
    Job first, second;
    bool together;
    const char* what;
  } kRows[] = {
      {job(0, 100, 100), job(200, 300, 100), true, "nothing in common"},
      {job(0, 100, 100), job(0, 200, 100), true, "both read the same"},
      {job(0, 0, 100), job(100, 100, 100), true, "in place, side by side"},
      {job(0, 100, 100), job(199, 300, 50), false, "reads what the first one writes"},
      {job(0, 100, 100), job(300, 99, 50), false, "writes what the first one reads"},
      {job(0, 100, 100), job(300, 150, 10), false, "writes what the first one writes"},
      {job(0, 0, 100), job(0, 0, 100), false, "in place, again"},
      {job(0, 100, 100), job(150, 150, 0), true, "of nothing"},
  };
  for (const auto& row : kRows) {
    LaunchBatch batch(2);
    ASSERT_TRUE(add(batch, row.first));
    EXPECT_EQ(add(batch, row.second), row.together) << row.what;
    EXPECT_EQ(batch.jobs().size(), row.together ? 2u : 1u);
    batch.clear();
    EXPECT_TRUE(add(batch, row.second)) << "first in the next launch";
  }
}

TEST(LaunchBatch, ListsThatInterleaveAreApart) {
  LaunchBatch batch(2);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(batch.add(0, [&](uint32_t index, Piece* table) {
      for (size_t p = 0; p < 2; ++p) table[p] = {memory + 1000 * p + 10 * i, 10};
      Job job;
      job.recv = {Kind::kTable, index, nullptr, 0};
      return job;
    })) << i;
    EXPECT_EQ(batch.pieces().size(), 4 * (i + 1));
  }
  EXPECT_FALSE(add(batch, job(500, 1005, 10))) << "what one of them writes";
  EXPECT_TRUE(add(batch, job(500, 1030, 10))) << "between them";
}

TEST(LaunchBatch, MovesAreAsManyAsTheyList) {
  LaunchBatch batch(2);
  const auto moves = [&](size_t from, size_t to) {
    std::vector<Piece> out, in;
    for (size_t i = 0; i < 5; ++i)
      out.push_back({memory + from + 20 * i, 10}), in.push_back({memory + to + 20 * i, 10});
    return batch.add(10, [&](uint32_t index, Piece* table) { return kernel::job_of_moves(out, in, index, table); });
  };
  EXPECT_TRUE(moves(0, 1000));
  EXPECT_EQ(batch.pieces().size(), 10u);
  EXPECT_FALSE(moves(1080, 2000)) << "reads the last piece that the first copies write";
  EXPECT_TRUE(moves(1010, 2000)) << "between them";
  EXPECT_FALSE(add(batch, job(2040, 3000, 1)));
  EXPECT_TRUE(add(batch, job(2030, 3000, 10)));
  EXPECT_EQ(batch.jobs().size(), 3u);
  EXPECT_FALSE(add(batch, Job(), kernel::kLaunchPieces));
  batch.clear();
  EXPECT_FALSE(add(batch, Job(), kernel::kLaunchPieces + 1));
  EXPECT_TRUE(add(batch, Job(), kernel::kLaunchPieces));
}

/// The kernel of a multicast job takes one job.
TEST(LaunchBatch, AMulticastJobIsAlone) {
  Job multicast = job(0, 0, 10);
  multicast.algorithm = kernel::DeviceAlgorithm::kReduceMulticast;
  LaunchBatch batch(2);
  EXPECT_TRUE(add(batch, multicast));
  EXPECT_FALSE(add(batch, job(100, 100, 10)));
  batch.clear();
  EXPECT_TRUE(add(batch, job(100, 100, 10)));
  EXPECT_FALSE(add(batch, multicast));
}

TEST(LaunchBatch, IsFullWhenALaunchIs) {
  LaunchBatch jobs(2);
  for (size_t i = 0; i < kernel::kLaunchJobs; ++i) ASSERT_TRUE(add(jobs, job(10 * i, 10 * i, 10)));
  EXPECT_FALSE(add(jobs, job(3000, 3000, 10)));
  LaunchBatch pieces(400);
  const auto listed = [](uint32_t index, Piece* table) {
    std::fill_n(table, 800, Piece{});
    Job job;
    job.send = {Kind::kTable, index, nullptr, 0};
    return job;
  };
  ASSERT_TRUE(pieces.add(0, listed));
  EXPECT_FALSE(pieces.add(0, listed));
  pieces.clear();
  EXPECT_TRUE(pieces.add(0, listed));
}

}  // namespace
}  // namespace nvx
