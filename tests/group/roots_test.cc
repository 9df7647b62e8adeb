// Ranks that call a collective with different roots: what they are told, wherever they are.

#include <gtest/gtest.h>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;

struct Case {
  Collective collective;
  std::vector<int> hosts;
};

class Roots : public testing::TestWithParam<Case> {};

/// The ranks of a broadcast or scatter may not meet in it, and then learn of it from what they call next.
TEST_P(Roots, ThatDifferAreToldByTheNextOperations) {
  Hosts hosts(GetParam().hosts);
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, hosts.options("roots", rank));
    const Play before{.collective = Collective::kAllReduce, .dtype = DType::kI32, .counts = {3, 3}};
    ASSERT_EQ(perform(group, before), "");
    Status status =
        run(group, {.collective = GetParam().collective, .dtype = DType::kI32, .root = rank, .counts = {5, 5}});
    for (int later = 0; later < 2 && status.ok(); ++later) status = run(group, before);
    ASSERT_FALSE(status.ok());
    const std::string text = status.what();
    for (int root = 0; root < 2; ++root) {
      const size_t who = text.find("rank " + std::to_string(root) + " (pid");
      ASSERT_NE(who, std::string::npos) << text;
      const std::string said = text.substr(who, text.find(')', text.find(" called ", who)) + 1 - who);
      EXPECT_NE(said.find(std::string(" called ") + name(GetParam().collective)), std::string::npos) << text;
      EXPECT_TRUE(said.ends_with("root " + std::to_string(root) + ")")) << said << " in " << text;
    }
    EXPECT_NE(text.find("): their roots differ"), std::string::npos) << text;
  });
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Collective c : {Collective::kBroadcast, Collective::kReduce, Collective::kGather, Collective::kScatter}) {
    for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) cases.push_back({c, hosts});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Collectives, Roots, testing::ValuesIn(all_cases()), [](const auto& one) {
  return std::string(name(one.param.collective)) + (one.param.hosts[1] == 0 ? "_inside" : "_between");
});

}  // namespace
}  // namespace nvx::test
