#include "group/core/status.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/handle.h"
#include "support/groups.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

Operation numbered_all_reduce(uint64_t number, size_t count) {
  Operation o;
  o.collective = Collective::kAllReduce;
  o.dtype = DType::kF32;
  o.number = number;
  o.count = count;
  return o;
}

TEST(Status, KeepsTheCurrentCallAndTheLastOne) {
  GroupStatus status("calls", 1, 4);
  const StatusSlot& slot = status.slot();
  EXPECT_EQ(slot.state, StatusSlot::kSetUp);
  status.open(7);
  for (uint64_t n = 1; n <= 3; ++n) {
    const Operation o = numbered_all_reduce(n, 10 * n);
    const CallStatus call(status, o, Clock::now());
    EXPECT_EQ(slot.begun, n);
    EXPECT_EQ(slot.ended, n - 1);
    EXPECT_EQ(slot.calls[n % 2].number, n);
    EXPECT_EQ(slot.calls[(n - 1) % 2].bytes, 40 * (n - 1));
  }
  EXPECT_EQ(slot.ended, 3u);
  const StatusSlot::Total& total = slot.totals[size_t(Collective::kAllReduce)];
  EXPECT_EQ(total.calls, 3u);
  EXPECT_EQ(total.bytes, 40u + 80 + 120);
  EXPECT_EQ(slot.state, StatusSlot::kOpen);
}

TEST(Status, CountsTheChunksOfAnOperationAsOneCall) {
  GroupStatus status("chunks", 0, 2);
  Operation chunk = numbered_all_reduce(5, 100);
  const Whole whole{chunk.fingerprint(), Deadline(), 0};
  chunk.whole = &whole;
  for (int k = 0; k < 3; ++k) const CallStatus call(status, chunk, Clock::now());
  chunk.number = 6;
  { const CallStatus call(status, chunk, Clock::now()); }
  const StatusSlot::Total& total = status.slot().totals[size_t(Collective::kAllReduce)];
  EXPECT_EQ(total.calls, 2u);
  EXPECT_EQ(total.bytes, 4u * 400);
}

TEST(Status, ShowsTheRanksForWhichItSleptLongest) {
  GroupStatus status("late", 0, 20);
  for (int turn = 0; turn < 3; ++turn) {
    for (int rank = 1; rank < 20; ++rank) {
      const Operation o = numbered_all_reduce(1, 1);
      const CallStatus call(status, o, Clock::now());
      status.sleeps(0);
      status.slept(0, milliseconds(0));
      status.sleeps(rank);
      EXPECT_EQ(status.slot().awaited, uint32_t(rank + 1));
      status.slept(rank, milliseconds(rank));
      EXPECT_EQ(status.slot().awaited, 0u);
    }
  }
  std::vector<int> shown;
  for (const StatusSlot::Late& late : status.slot().lates) {
    shown.push_back(int(late.rank) - 1);
    EXPECT_EQ(late.ns, 3'000'000u * uint64_t(shown.back()));
    EXPECT_EQ(late.times, 3u);
  }
  std::sort(shown.begin(), shown.end());
  EXPECT_EQ(shown, (std::vector{12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(status.lates().find("rank 19 0.06 s (last in 3 calls), rank 18"), 0u) << status.lates();
}

TEST(Status, GivesSlotsBackAndDoesWithoutOne) {
  std::vector<std::unique_ptr<GroupStatus>> groups;
  for (size_t i = 0; i < StatusPage::kSlots + 2; ++i)
    groups.push_back(std::make_unique<GroupStatus>("many", int(i), 1000));
  groups.back()->fail("a failure");
  EXPECT_STREQ(groups.back()->slot().failure, "a failure");
  const StatusSlot& first = groups.front()->slot();
  EXPECT_STREQ(first.name, "many");
  groups.front().reset();
  EXPECT_EQ(first.state, StatusSlot::kFree);
  const GroupStatus next("next", 3, 4);
  EXPECT_EQ(&next.slot(), &first);
  EXPECT_STREQ(first.name, "next");
}

TEST(Status, IsReadableByOthersButNotWritable) {
  const GroupStatus status("sealed", 0, 1);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find(StatusPage::kName) == std::string::npos) continue;
    const Fd fd(open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
    char text[16] = {};
    EXPECT_EQ(pread(fd.get(), text, 11, 0), 11);
    EXPECT_STREQ(text, "{\"version\":");
    if (!(fcntl(fd.get(), F_GET_SEALS) & 0x0010)) GTEST_SKIP() << "this kernel has no F_SEAL_FUTURE_WRITE";
    EXPECT_EQ(pwrite(fd.get(), "x", 1, 0), -1);
    EXPECT_NE(ftruncate(fd.get(), 0), 0);
    return;
  }
  FAIL() << "no page in /proc/self/fd";
}

/// Rank 1 comes late to a barrier; rank 0 shows that it waits for it.
void one_waits_for_the_other(Group& group) {
  ASSERT_TRUE(barrier(group).ok());
  const StatusSlot& slot = group.core().status->slot();
  if (group.rank() == 1) {
    std::this_thread::sleep_for(milliseconds(300));
    EXPECT_TRUE(barrier(group).ok());
    return;
  }
  std::atomic<bool> seen{false}, over{false};
  std::thread look([&] {
    while (!over && !seen) seen = slot.awaited == 2 && slot.begun == slot.ended + 1;
  });
  EXPECT_TRUE(barrier(group).ok());
  over = true;
  look.join();
  EXPECT_TRUE(seen);
  EXPECT_EQ(slot.lates[0].rank, 2u);
  EXPECT_GE(slot.lates[0].times, 1u);
  EXPECT_GT(slot.lates[0].ns, 100'000'000u);
  EXPECT_EQ(slot.awaited, 0u);
}

TEST(Status, NamesTheRankThatAHostWaitsFor) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("late", rank, 2));
    one_waits_for_the_other(group);
  });
}

TEST(Status, NamesTheRankOfAnotherHost) {
  MemoryStore store;
  Hosts hosts({0, 1});
  as_threads(2, [&](int rank) {
    Group group(store, hosts.options("far", rank));
    one_waits_for_the_other(group);
  });
}

}  // namespace
}  // namespace nvx::test
