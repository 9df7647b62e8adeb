// Ranks that wait for each other in several groups, or in messages: a timeout prints the cycle.
#include "group/core/wait_cycle.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "group/core/status.h"
#include "support/groups.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

struct Wait {
  char group;  // its name
  enum Kind { kBarrier, kMonitored, kReceive } kind = kBarrier;
};
struct Cycle {
  const char* name;
  std::map<char, std::vector<uint64_t>> groups;  // global ranks by name
  std::vector<Wait> waits;                       // by global rank
  const char* words;
};
void PrintTo(const Cycle& cycle, std::ostream* out) { *out << cycle.name; }

GroupOptions options_of(const Cycle& cycle, char group, size_t rank) {
  const std::vector<uint64_t>& ranks = cycle.groups.at(group);
  GroupOptions o = options(std::string(1, group), int(rank), int(ranks.size()));
  o.global_ranks = ranks;
  return o;
}

/// In a group of two.
Status wait_in(Group& group, Wait::Kind kind) {
  std::byte data[8];
  if (kind == Wait::kMonitored) return group.monitored_barrier(milliseconds(200), /*name_all=*/true);
  if (kind == Wait::kReceive) return receive_now(group, message(1 - group.rank(), 0, data, sizeof data));
  return barrier(group);
}

bool sleeps(pid_t pid) {
  const std::vector<std::byte> page = StatusPage::read(pid);
  for (size_t at = 0; at < page.size(); at += StatusPage::kSlotBytes) {
    const auto& slot = *reinterpret_cast<const StatusSlot*>(page.data() + at);
    if (slot.awaited.load() != 0 || slot.of_message.rank.load() != 0) return true;
  }
  return false;
}

/// Rank 0 begins its wait when all others are in theirs, and times out; its leave ends the others' waits.
void close_cycle(const Cycle& cycle, int rank, std::map<char, FolderStore>& stores) {
  std::map<char, std::unique_ptr<Group>> groups;
  for (const auto& [name, ranks] : cycle.groups) {
    for (size_t r = 0; r < ranks.size(); ++r) {
      if (int(ranks[r]) == rank) groups[name] = std::make_unique<Group>(stores[name], options_of(cycle, name, r));
    }
  }
  Store& pids = stores['a'];
  const auto pid_of = [](int r) { return "pid " + std::to_string(r); };
  const auto [name, kind] = cycle.waits[size_t(rank)];
  Group& group = *groups[name];
  if (rank != 0) {
    const pid_t pid = getpid();
    const auto* bytes = reinterpret_cast<const uint8_t*>(&pid);
    pids.set(pid_of(rank), {bytes, bytes + sizeof pid});
    EXPECT_FALSE(wait_in(group, kind).ok());
    return;
  }
  for (int r = 1; r < int(cycle.waits.size()); ++r) {
    const auto value = pids.get(pid_of(r), milliseconds(20'000));
    ASSERT_TRUE(value);
    pid_t pid = 0;
    std::memcpy(&pid, value->data(), sizeof pid);
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return sleeps(pid); }));
  }
  group.set_timeout(milliseconds(200));
  EXPECT_CONTAINS(wait_in(group, kind), std::string("; cycle of waits: ") + cycle.words);
}

class WaitCycle : public testing::TestWithParam<Cycle> {};

TEST_P(WaitCycle, IsInTheTextOfATimeout) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  std::map<char, FolderStore> stores;
  for (const char name : {'a', 'b', 'c'}) stores[name];
  all_end_well(int(GetParam().waits.size()), [&](int rank) { close_cycle(GetParam(), rank, stores); });
}

const std::vector<uint64_t> kBoth = {0, 1};

INSTANTIATE_TEST_SUITE_P(
    All, WaitCycle,
    testing::Values(
        Cycle{"TwoGroups",
              {{'a', kBoth}, {'b', kBoth}},
              {{'a'}, {'b'}},
              "rank 0 waits in group a (barrier) for rank 1, rank 1 waits in group b (barrier) for rank 0;"},
        Cycle{"ThreeGroups",
              {{'a', {0, 1}}, {'b', {1, 2}}, {'c', {2, 0}}},
              {{'a'}, {'b'}, {'c'}},
              "rank 0 waits in group a (barrier) for rank 1, rank 1 waits in group b (barrier) for rank 2, "
              "rank 2 waits in group c (barrier) for rank 0;"},
        Cycle{"TwoReceives",
              {{'a', kBoth}},
              {{'a', Wait::kReceive}, {'a', Wait::kReceive}},
              "rank 0 waits in group a (recv) for rank 1, rank 1 waits in group a (recv) for rank 0;"},
        Cycle{"ACollectiveAndAReceive",
              {{'a', kBoth}, {'b', kBoth}},
              {{'a'}, {'b', Wait::kReceive}},
              "rank 0 waits in group a (barrier) for rank 1, rank 1 waits in group b (recv) for rank 0;"},
        Cycle{"AMonitoredBarrier",
              {{'a', kBoth}, {'b', kBoth}},
              {{'a', Wait::kMonitored}, {'b'}},
              "rank 0 waits in group a (monitored_barrier) for rank 1, rank 1 waits in group b (barrier)"}),
    [](const auto& cycle) { return cycle.param.name; });

/// Rank 1 gives up before rank 0 begins to wait.
TEST(WaitCycles, AreNotMadeOfWaitsOneAfterAnother) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore a, b;
  all_end_well(2, [&](int rank) {
    Group first(a, options("a", rank, 2)), second(b, options("b", rank, 2));
    Group& mine = rank == 1 ? first : second;
    mine.set_timeout(milliseconds(100));
    EXPECT_TRUE(rank == 1 || a.get("rank 1 has given up", milliseconds(20'000)));
    const Status status = barrier(mine);
    EXPECT_CONTAINS(status, "timed out in barrier #1");
    EXPECT_EQ(status.what().find("cycle"), std::string::npos) << status.what();
    if (rank == 1) a.set("rank 1 has given up", {1});
    EXPECT_TRUE(rank == 0 || a.get("rank 0 has given up", milliseconds(20'000)));
    if (rank == 0) a.set("rank 0 has given up", {1});
  });
}

}  // namespace
}  // namespace nvx::test
