// The same functions at the scale of a large machine. Times are simulated; everything else is counted.

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "support/simulate.h"
#include "support/traffic.h"

namespace nvx::test {
namespace {

using schedule::Collective;
using schedule::find;
using schedule::Row;

constexpr int kRanks = 10000;
constexpr size_t kBlock = 100;                                // bytes per rank: 1 MB in total
constexpr Costs kInside{.message = 2e-6, .byte = 1 / 400e9};  // of a host
constexpr Costs kMessagesOnly{.message = 1, .byte = 0};

struct ExpectedRun {
  Collective collective;
  const char* name;
  uint64_t steps, messages;  ///< of the busiest rank; messages that it sends
  size_t sent, scratch;
  double in_a_row;  ///< messages in sequence, until the last rank ends; -1: the row was sampled
};

std::string text(const ExpectedRun& e) {
  char text[160];
  std::snprintf(text, sizeof text, "%-14s %-18s %7llu steps %6llu messages %8zu B sent %11zu B scratch %5.0f in a row",
                name(e.collective), e.name, (unsigned long long)e.steps, (unsigned long long)e.messages, e.sent,
                e.scratch, e.in_a_row);
  return text;
}

// clang-format off
constexpr ExpectedRun kWhole[] = {
    // collective              row                    steps messages       sent    scratch in a row
    {Collective::kAllReduce,     "recursive_doubling",      15,     14,   14000000,          0,     15},
    {Collective::kAllReduce,     "halving_doubling",        28,     27,    3015560,          0,     28},
    {Collective::kReduceScatter, "halving",                 16,     14,    1000000,    1000000,     15},
    {Collective::kAllGather,     "bruck",                   17,     14,     999900,    1000000,     14},
    {Collective::kBroadcast,     "binomial",                15,     14,   14000000,          0,     14},
    {Collective::kBroadcast,     "chain",                    2,      1,    1000000,          0,   9999},
    {Collective::kReduce,        "binomial",                14,      1,    1000000,    1000000,     14},
    {Collective::kReduce,        "chain",                    2,      1,    1000000,    1000000,   9999},
    {Collective::kReduce,        "halving_gather",          27,     14,    1491972,    1000000,     27},
    {Collective::kGather,        "linear",               10000,      1,        100,          0,   9999},
    {Collective::kScatter,       "linear",               10000,   9999,     999900,          0,   9999},
    {Collective::kBarrier,       "dissemination",           14,     14,         14,         15,     14},
};
constexpr ExpectedRun kSampled[] = {
    {Collective::kAllReduce,     "ring",                 19998,  19998,    1999800,          0,     -1},
    {Collective::kReduceScatter, "ring",                  9999,   9999,     999900,        300,     -1},
    {Collective::kAllGather,     "ring",                 10000,   9999,     999900,          0,     -1},
    {Collective::kAllGather,     "direct",               10000,   9999,     999900,          0,     -1},
    {Collective::kBroadcast,     "scatter_all_gather",   10014,  10013,    1999800,          0,     -1},
    {Collective::kReduce,        "ring_gather",          19998,  10000,    1000000,    1000000,     -1},
    {Collective::kAllToAll,      "pairwise",             10000,   9999,     999900,          0,     -1},
};
// clang-format on

void expect(const ExpectedRun& want, const Row& row, const Simulated& got, double in_a_row) {
  EXPECT_EQ(got.error, "") << want.name;
  EXPECT_EQ(
      text({want.collective, want.name, got.most_steps, got.most_messages, got.most_sent, got.most_scratch, in_a_row}),
      text(want));
  EXPECT_LE(got.most_messages, most_messages(row, kRanks)) << want.name;
  EXPECT_LE(got.most_sent, most_sent(row, large_shape(want.collective, kRanks, kBlock, 4).layout(0))) << want.name;
}

TEST(Simulation, EveryRowForTenThousandRanksIsSimulated) {
  for (const Row& row : schedule::catalog()) {
    if (!row.legal(large_shape(row.collective, kRanks, kBlock, 4).layout(0))) continue;
    const auto is_row = [&](const ExpectedRun& e) {
      return e.collective == row.collective && e.name == std::string_view(row.name);
    };
    EXPECT_TRUE(std::ranges::any_of(kWhole, is_row) || std::ranges::any_of(kSampled, is_row))
        << name(row.collective) << " \"" << row.name
        << "\" has no line in kWhole, or in kSampled if its steps are too many";
  }
}

TEST(Simulation, TenThousandRanksEveryStepOfEach) {
  for (const ExpectedRun& want : kWhole) {
    const Row* row = find(want.collective, want.name);
    ASSERT_NE(row, nullptr) << want.name;
    const Simulated got = simulate(*row, large_shape(want.collective, kRanks, kBlock, 4), kMessagesOnly);
    expect(want, *row, got, got.seconds);
    EXPECT_GE(got.seconds, double(row->guarantee.depth(kRanks))) << want.name;
  }
}

TEST(Simulation, TenThousandRanksEveryStepOfFiveRanks) {
  constexpr int kSample[] = {0, 1, 4999, 5000, 9999};
  for (const ExpectedRun& want : kSampled) {
    const Row* row = find(want.collective, want.name);
    ASSERT_NE(row, nullptr) << want.name;
    expect(want, *row, sample(*row, large_shape(want.collective, kRanks, kBlock, 4), kSample), -1);
  }
}

/// Rows with too many steps for ten thousand ranks, and all others, at a thousand ranks, an arbitrary count.
TEST(Simulation, AThousandRanksEveryStepOfEachInEveryRow) {
  constexpr int kFewer = 1000;
  for (const Row& row : schedule::catalog()) {
    const Shape shape = large_shape(row.collective, kFewer, 8, 4);
    if (!row.legal(shape.layout(0))) continue;
    const Simulated got = simulate(row, shape, kMessagesOnly);
    EXPECT_EQ(got.error, "") << row.name;
    EXPECT_LE(got.most_messages, most_messages(row, kFewer)) << row.name;
    EXPECT_LE(got.most_sent, most_sent(row, shape.layout(0))) << row.name;
    std::printf("simulated, %d ranks: %-14s %-18s %9llu messages, %5.0f one after another\n", kFewer,
                name(row.collective), row.name, (unsigned long long)got.messages, got.seconds);
  }
}

/// Inside hosts and then between them: every rank of a host sends an eighth of the whole over its rail.
double rails_seconds(const Row& between, int hosts, int per_host, size_t bytes) {
  const size_t part = bytes / size_t(per_host);
  const auto inside = [&](Collective c) {
    return simulate(*find(c, "ring"), large_shape(c, per_host, part, 4), kInside).seconds;
  };
  const Shape rail = large_shape(Collective::kAllReduce, hosts, part / size_t(hosts), 4);
  return inside(Collective::kReduceScatter) + simulate(between, rail).seconds + inside(Collective::kAllGather);
}

/// Against the closed forms for the same costs: 2 (N - 1) messages of n / N round a ring, and 2 log2 N messages that
/// come to n (N - 1) / N each way by halving and doubling.
TEST(Simulation, RailsOf1024HostsOf8TakeTheTimeOfTheFormulas) {
  constexpr int kHosts = 1024, kPerHost = 8, kAll = kHosts * kPerHost;
  constexpr Costs kBetween;
  const auto by_ring = [](const Costs& c, int n, double bytes) { return (n - 1) * (c.message + bytes / n * c.byte); };
  const auto by_halving = [](const Costs& c, int n, double bytes) {
    return schedule::log2_up(n) * c.message + bytes * (n - 1) / n * c.byte;
  };
  const Row &ring = *find(Collective::kAllReduce, "ring"), &halving = *find(Collective::kAllReduce, "halving_doubling");
  for (const size_t bytes : {size_t(64) << 10, size_t(64) << 20, size_t(1) << 30}) {
    const double n = double(bytes), inside = 2 * by_ring(kInside, kPerHost, n);
    const double rails_ring = rails_seconds(ring, kHosts, kPerHost, bytes);
    const double rails_halving = rails_seconds(halving, kHosts, kPerHost, bytes);
    const Shape flat = large_shape(Collective::kAllReduce, kAll, bytes / kAll, 4);
    const double flat_halving = simulate(halving, flat).seconds;
    EXPECT_NEAR(rails_ring / (inside + 2 * by_ring(kBetween, kHosts, n / kPerHost)), 1, 1e-6);
    EXPECT_NEAR(rails_halving / (inside + 2 * by_halving(kBetween, kHosts, n / kPerHost)), 1, 1e-6);
    EXPECT_NEAR(flat_halving / (2 * by_halving(kBetween, kAll, n)), 1, 1e-6);
    std::printf(
        "simulated, %d hosts of %d ranks, %10zu B: %6.2f ms by rails and rings, %5.2f ms by rails and halving, %5.2f "
        "ms flat\n",
        kHosts, kPerHost, bytes, rails_ring * 1e3, rails_halving * 1e3, flat_halving * 1e3);
  }
}

}  // namespace
}  // namespace nvx::test
