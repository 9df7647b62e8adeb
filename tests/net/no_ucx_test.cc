// The error of a build without UCX for ranks on several hosts; groups on one host work.

#include <gtest/gtest.h>

#include "net/ucx/ucx.h"
#include "support/groups.h"

namespace nvx::test {
namespace {

TEST(WithoutUcx, RanksOnSeveralHostsGetAnErrorThatNamesThePackage) {
  if (net::built_with_ucx()) GTEST_SKIP() << "this build has UCX";
  MemoryStore store;
  as_threads(2, [&](int rank) {
    GroupOptions own = options("apart", rank, 2);
    own.host = "host" + std::to_string(rank);
    const auto began = Clock::now();
    const std::string error = set_up_error(store, own);
    EXPECT_NE(error.find("this build has no UCX"), std::string::npos) << error;
    EXPECT_NE(error.find("'pip install libucx-cu13' or 'apt-get install libucx-dev'"), std::string::npos) << error;
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
  });
}

TEST(WithoutUcx, RanksOnOneHostMakeAGroup) {
  if (net::built_with_ucx()) GTEST_SKIP() << "this build has UCX";
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("together", rank, 2));
    EXPECT_TRUE(barrier(group).ok());
  });
}

}  // namespace
}  // namespace nvx::test
