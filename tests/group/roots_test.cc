// Ranks that call a collective with different roots: their errors, on one host and on several.

#include <gtest/gtest.h>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;

struct Case {
  Collective collective;
  std::vector<int> hosts;
};

class DifferentRoots : public testing::TestWithParam<Case> {};

/// The ranks of a broadcast or scatter may not meet in it. They then learn of it from their next calls.
TEST_P(DifferentRoots, ThatDifferAreReportedByTheNextOperations) {
  Hosts hosts(GetParam().hosts);
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, hosts.options("roots", rank));
    const Spec before{.collective = Collective::kAllReduce, .dtype = DType::kI32, .counts = {3, 3}};
    ASSERT_EQ(perform(group, before), "");
    Status status =
        run(group, {.collective = GetParam().collective, .dtype = DType::kI32, .root = rank, .counts = {5, 5}});
    for (int later = 0; later < 2 && status.ok(); ++later) status = run(group, before);
    ASSERT_FALSE(status.ok());
    const std::string text = status.what();
    for (int root = 0; root < 2; ++root) {
      const size_t who = text.find("rank " + std::to_string(root) + " (pid");
      ASSERT_NE(who, std::string::npos) << text;
      const std::string call = text.substr(who, text.find(')', text.find(" called ", who)) + 1 - who);
      EXPECT_NE(call.find(std::string(" called ") + name(GetParam().collective)), std::string::npos) << text;
      EXPECT_TRUE(call.ends_with("root " + std::to_string(root) + ")")) << call << " in " << text;
    }
    EXPECT_NE(text.find("): their roots differ"), std::string::npos) << text;
  });
}

/// If there is no next call, the rank that leaves last can still report it.
TEST(Roots, ThatDifferInTheLastOperationAreWarnedOf) {
  for (const bool differ : {false, true}) {
    MemoryStore store;
    testing::internal::CaptureStderr();
    as_threads(2, [&](int rank) {
      Group group(store, options("last", rank, 2, uint32_t(-1)));
      for (int round = 0; round < 3; ++round) ASSERT_TRUE(barrier(group).ok());
      const Spec last{
          .collective = Collective::kBroadcast, .dtype = DType::kI32, .root = differ ? rank : 0, .counts = {5, 5}};
      ASSERT_TRUE(run(group, last).ok());
    });
    const std::string output = testing::internal::GetCapturedStderr();
    EXPECT_EQ(output.find("collective mismatch in group last, noticed when this rank left it: ") != std::string::npos,
              differ)
        << output;
    EXPECT_EQ(output.find("): their roots differ. Next: make all ranks call") != std::string::npos, differ) << output;
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Collective c : {Collective::kBroadcast, Collective::kReduce, Collective::kGather, Collective::kScatter}) {
    for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) cases.push_back({c, hosts});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Collectives, DifferentRoots, testing::ValuesIn(all_cases()), [](const auto& one) {
  return std::string(name(one.param.collective)) + (one.param.hosts[1] == 0 ? "_inside" : "_between");
});

}  // namespace
}  // namespace nvx::test
