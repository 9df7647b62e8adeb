#include "kernel/cpu/flag_round.h"

#include <gtest/gtest.h>

#include <array>
#include <thread>

namespace nvx {
namespace {

struct alignas(128) Shared {
  std::array<std::byte, kFlagRoundBytes> bytes{};
};

TEST(FlagRound, BothSidesAgreeAndMayRepeat) {
  Shared shared;
  for (int again = 0; again < 3; ++again) {
    double other = -1;
    std::thread peer([&] { other = flag_round(&shared, /*side=*/1, 10).count(); });
    const double mine = flag_round(&shared, /*side=*/0, 10).count();
    peer.join();
    EXPECT_GT(mine, 0);
    EXPECT_GT(other, 0);
    EXPECT_LT(mine, 1);
  }
}

TEST(FlagRound, EndsWithoutTheOtherSide) {
  Shared shared;
  EXPECT_LT(flag_round(&shared, /*side=*/0, 10, std::chrono::milliseconds(20)).count(), 0);
}

}  // namespace
}  // namespace nvx
