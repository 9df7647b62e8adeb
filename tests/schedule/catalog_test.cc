// The guarantees of all rows as a table: a changed cost is a changed line here. Other tests prove that the rows keep
// them.

#include "schedule/catalog.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "schedule/ring.h"
#include "schedule/tree.h"
#include "support/traffic.h"
#include "support/verify.h"

namespace nvx::test {
namespace {

using schedule::catalog;
using schedule::Collective;
using schedule::find;
using schedule::Order;
using schedule::Row;

struct ExpectedRow {
  int size;
  Collective collective;
  const char* name;
  const char* order;
  uint64_t messages, depth;
  size_t sent, scratch;
};

// clang-format off
/// For 896 B in total, or in total for the other ranks.
constexpr ExpectedRow kRows[] = {
    // ranks collective          row                  order      messages depth sent scratch
    {2, Collective::kAllReduce,     "pair",               "by rank",     1,     1,   896,      0},
    {8, Collective::kAllReduce,     "recursive_doubling", "uniform",     3,     3,  2688,      0},
    {8, Collective::kAllReduce,     "halving_doubling",   "by place",    6,     6,  1568,      0},
    {8, Collective::kAllReduce,     "ring",               "by place",   14,    14,  1568,      0},
    {8, Collective::kReduceScatter, "halving",            "by place",    3,     3,   784,    896},
    {8, Collective::kReduceScatter, "ring",               "by place",    7,     7,   784,    336},
    {8, Collective::kAllGather,     "direct",             "moves",       7,     1,   784,      0},
    {8, Collective::kAllGather,     "bruck",              "moves",       3,     3,   784,    896},
    {8, Collective::kAllGather,     "ring",               "moves",       7,     7,   784,      0},
    {8, Collective::kBroadcast,     "binomial",           "moves",       3,     3,  2688,      0},
    {8, Collective::kBroadcast,     "chain",              "moves",       1,     7,   896,      0},
    {8, Collective::kBroadcast,     "scatter_all_gather", "moves",      10,    10,  1568,      0},
    {8, Collective::kReduce,        "binomial",           "uniform",     3,     3,   896,    896},
    {8, Collective::kReduce,        "chain",              "uniform",     1,     7,   896,    896},
    {8, Collective::kReduce,        "halving_gather",     "by place",    6,     6,  1232,    896},
    {8, Collective::kReduce,        "ring_gather",        "by place",   14,     8,   896,    896},
    {8, Collective::kGather,        "linear",             "moves",       7,     1,   112,      0},
    {8, Collective::kScatter,       "linear",             "moves",       7,     1,   784,      0},
    {8, Collective::kAllToAll,      "pairwise",           "moves",       7,     1,   784,      0},
    {8, Collective::kBarrier,       "dissemination",      "moves",       3,     3,     3,      4},
    {7, Collective::kAllReduce,     "recursive_doubling", "uniform",     4,     4,  2688,      0},
    {7, Collective::kAllReduce,     "halving_doubling",   "by place",    6,     6,  2240,      0},
    {7, Collective::kReduceScatter, "halving",            "by place",    4,     4,   896,    896},
    {7, Collective::kReduce,        "halving_gather",     "by place",    5,     5,  1120,    896},
    {7, Collective::kBroadcast,     "scatter_all_gather", "moves",       9,     9,  1536,      0},
};
// clang-format on

const char* text(Order order) {
  switch (order) {
    case Order::kNone: return "moves";
    case Order::kByPlace: return "by place";
    case Order::kUniform: return "uniform";
    case Order::kRank: return "by rank";
  }
  return "";
}

std::string text(const ExpectedRow& e) {
  char text[160];
  std::snprintf(text, sizeof text, "%d ranks %-14s %-18s %-8s %3zu messages %3zu deep %5zu B sent %5zu B scratch",
                e.size, name(e.collective), e.name, e.order, size_t(e.messages), size_t(e.depth), e.sent, e.scratch);
  return text;
}

Shape shape(Collective collective, int size) {
  return shape_of({.collective = collective, .size = size, .elements = 224, .width = 4});
}

std::string text(const Row& row, int size) {
  const Shape s = shape(row.collective, size);
  size_t scratch = 0;
  for (int rank = 0; rank < size; ++rank) scratch = std::max(scratch, row.scratch(s.layout(rank), rank));
  return text({size, row.collective, row.name, text(row.guarantee.order), most_messages(row, size),
               row.guarantee.depth(size), most_sent(row, s.layout(0)), scratch});
}

TEST(Catalog, IsThisTable) {
  std::set<const Row*> seen;
  for (const ExpectedRow& e : kRows) {
    const Row* row = find(e.collective, e.name);
    ASSERT_NE(row, nullptr) << e.name;
    EXPECT_EQ(text(*row, e.size), text(e));
    seen.insert(row);
  }
  for (const Row& row : catalog()) {
    EXPECT_TRUE(seen.contains(&row)) << name(row.collective) << " \"" << row.name << "\" has no line in kRows";
  }
}

TEST(Catalog, FindsEachRowByItsName) {
  for (const Row& row : catalog()) EXPECT_EQ(find(row.collective, row.name), &row);
  EXPECT_EQ(find(Collective::kBarrier, "ring"), nullptr);
  EXPECT_EQ(find(Collective::kAllReduce, ""), nullptr);
}

/// Some row supports every layout.
TEST(Catalog, ServesAnyLayout) {
  for (int c = int(Collective::kAllReduce); c <= int(Collective::kBarrier); ++c) {
    for (const Blocks blocks : kAllBlocks) {
      for (const int size : {1, 2, 3, 8, 100}) {
        const Shape s = shape_of({.collective = Collective(c), .size = size, .elements = 999, .blocks = blocks});
        EXPECT_TRUE(std::any_of(catalog().begin(), catalog().end(), [&](const Row& row) {
          return row.collective == Collective(c) && legal(row, s);
        })) << s.text();
      }
    }
  }
}

/// An all-reduce has to send 2 (N - 1) / N of the whole from each rank; the others have to send half of that.
TEST(Catalog, MinimalRowsSendNoMoreThanNeeded) {
  struct Least {
    Collective collective;
    const char* name;
    size_t times;
    bool only_powers_of_two;
  };
  constexpr Least kLeast[] = {
      {Collective::kAllReduce, "ring", 2, false},     {Collective::kAllReduce, "halving_doubling", 2, true},
      {Collective::kReduceScatter, "ring", 1, false}, {Collective::kReduceScatter, "halving", 1, true},
      {Collective::kAllGather, "ring", 1, false},     {Collective::kAllGather, "direct", 1, false},
      {Collective::kAllGather, "bruck", 1, false},    {Collective::kBroadcast, "scatter_all_gather", 2, false}};
  for (const Least& least : kLeast) {
    for (int size = 1; size <= 64; ++size) {
      if (least.only_powers_of_two && size != 1 << schedule::log2_up(size)) continue;
      const size_t part = 12;
      const Shape s = shape_of({.collective = least.collective, .size = size, .elements = part * size_t(size)});
      const Row* row = find(least.collective, least.name);
      ASSERT_NE(row, nullptr) << least.name;
      EXPECT_EQ(most_sent(*row, s.layout(0)), least.times * size_t(size - 1) * part) << least.name << " " << size;
    }
  }
}

// A compiler can run a schedule too.
constexpr schedule::Layout kFour{.size = 4, .bytes = 16, .blocks = {}, .to = {}, .from = {}};
static_assert(schedule::RingAllReduce::at(kFour, 1, 0).send.offset == 4);
static_assert(schedule::RingAllReduce::at(kFour, 1, 5).recv.offset == 12);
static_assert(schedule::BinomialBroadcast::steps(kFour, 2) == 2);

}  // namespace
}  // namespace nvx::test
