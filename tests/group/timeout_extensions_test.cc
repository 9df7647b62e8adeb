// Extensions of timeouts: each lasts until the first operation that has it ends.

#include "group/timeout_extensions.h"

#include <gtest/gtest.h>

#include "support/ranks.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

TEST(TimeoutExtensions, NothingIsAddedUnasked) {
  const auto extensions = std::make_shared<TimeoutExtensions>();
  const auto share = extensions->begin();
  EXPECT_EQ(share.extra, milliseconds(0));
  EXPECT_EQ(share.until_it_ends, nullptr);
}

TEST(TimeoutExtensions, CountForAllUntilTheFirstHasEnded) {
  const auto extensions = std::make_shared<TimeoutExtensions>();
  extensions->add(milliseconds(100));
  auto first = extensions->begin();
  auto second = extensions->begin();
  EXPECT_EQ(first.extra, milliseconds(100));
  EXPECT_EQ(second.extra, milliseconds(100));
  second.until_it_ends.reset();
  EXPECT_EQ(extensions->begin().extra, milliseconds(100)) << "it is the first that counts";
  first.until_it_ends.reset();
  EXPECT_EQ(extensions->begin().extra, milliseconds(0));
}

TEST(TimeoutExtensions, AddUpAndEndIndependently) {
  const auto extensions = std::make_shared<TimeoutExtensions>();
  extensions->add(milliseconds(100));
  auto first = extensions->begin();
  extensions->add(milliseconds(20));
  extensions->add(milliseconds(3));
  auto second = extensions->begin();
  EXPECT_EQ(second.extra, milliseconds(123));
  first.until_it_ends.reset();
  EXPECT_EQ(extensions->begin().extra, milliseconds(23));
  second.until_it_ends.reset();
  EXPECT_EQ(extensions->begin().extra, milliseconds(0));
  extensions->add(milliseconds(7));
  EXPECT_EQ(extensions->begin().extra, milliseconds(7));
  EXPECT_EQ(extensions->begin().extra, milliseconds(0)) << "that one has ended at once";
}

TEST(TimeoutExtensions, NeverOverflowAndNeverShorten) {
  const auto extensions = std::make_shared<TimeoutExtensions>();
  extensions->add(milliseconds(-5));
  EXPECT_EQ(extensions->begin().extra, milliseconds(0));
  for (int i = 0; i < 3; ++i) extensions->add(milliseconds::max());
  auto share = extensions->begin();
  EXPECT_EQ(share.extra, Deadline::kForever);
  extensions->add(milliseconds(1));
  EXPECT_EQ(extensions->begin().extra, Deadline::kForever);
  share.until_it_ends.reset();
  EXPECT_EQ(extensions->begin().extra, milliseconds(0));
}

TEST(TimeoutExtensions, OutliveTheirOwner) {
  auto extensions = std::make_shared<TimeoutExtensions>();
  extensions->add(milliseconds(5));
  auto share = extensions->begin();
  const std::weak_ptr<TimeoutExtensions> seen = extensions;
  extensions.reset();
  EXPECT_FALSE(seen.expired());
  share.until_it_ends.reset();
  EXPECT_TRUE(seen.expired());
}

TEST(TimeoutExtensions, ManyThreadsBeginAndEnd) {
  const auto extensions = std::make_shared<TimeoutExtensions>();
  as_threads(4, [&](int) {
    for (int i = 0; i < 2000; ++i) {
      extensions->add(milliseconds(3));
      const auto share = extensions->begin();
      EXPECT_GE(share.extra, milliseconds(0));
    }
  });
  (void)extensions->begin();
  EXPECT_EQ(extensions->begin().extra, milliseconds(0));
}

}  // namespace
}  // namespace nvx::test
