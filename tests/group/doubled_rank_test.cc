// Two processes were started as the same rank: all ranks that wait for each other get an error soon.

#include <gtest/gtest.h>

#include "support/groups.h"

namespace nvx::test {
namespace {

constexpr int kWorld = 3;

class DuplicateRank : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rank, DuplicateRank, testing::Values(0, 1));

/// The last rank never comes, so without the check the others would wait until their timeout.
TEST_P(DuplicateRank, IsNamedToAllRanksOfTheGroup) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  all_end_well(1, [](int) {  // a process of its own: set-up may open UCX, and then later tests could not fork
    MemoryStore store;
    as_threads(kWorld, [&](int thread) {
      const int rank = thread == kWorld - 1 ? GetParam() : thread;
      GroupOptions own = options("doubled", rank, kWorld);
      own.host = "host" + std::to_string(thread);
      const auto began = Clock::now();
      try {
        Group group(store, own);
        ADD_FAILURE() << "made, without rank 2";
      } catch (const Error& error) {
        const std::string text = error.what(), pid = "pid " + std::to_string(getpid());
        EXPECT_TRUE(error.code() == Code::kMismatch || error.code() == Code::kPeerFailed) << text;
        const std::string twice =
            "rank " + std::to_string(GetParam()) + " of group doubled was claimed twice: by " + pid;
        EXPECT_NE(text.find(twice), std::string::npos) << text;
        for (const int who : {GetParam(), kWorld - 1})
          EXPECT_NE(text.find(pid + " on host host" + std::to_string(who)), std::string::npos) << text;
      }
      EXPECT_LT(Clock::now() - began, own.timeout / 2);
    });
  });
}

/// A duplicate that comes after set-up cannot know whether the others still use the group.
TEST(DuplicateRank, ALateOneGetsTheProcessThatHasItsRank) {
  MemoryStore store;
  as_threads(2,
             [&](int rank) { EXPECT_TRUE(barrier(*std::make_unique<Group>(store, options("late", rank, 2))).ok()); });
  GroupOptions late = options("late", 1, 2);
  late.host = "elsewhere";
  late.timeout = std::chrono::milliseconds(300);
  try {
    Group group(store, late);
    ADD_FAILURE() << "made, without rank 0";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0 has not"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 was joined before by pid " + std::to_string(getpid())), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace nvx::test
