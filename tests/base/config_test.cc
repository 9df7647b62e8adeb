// The registry of variables: how values are read, how wrong ones are reported, and which ones ranks must agree on.

#include "base/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "base/error.h"
#include "base/handle.h"
#include "base/hash.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

/// The stderr of a fresh process that reads its configuration with these variables, and then runs `check`.
std::string stderr_with(const std::vector<std::pair<const char*, const char*>>& set,
                        const std::function<void()>& check) {
  int pipes[2];
  EXPECT_EQ(pipe(pipes), 0);
  all_end_well(1, [&](int) {
    dup2(pipes[1], STDERR_FILENO);
    for (const auto& [name, value] : set) setenv(name, value, 1);
    config();
    check();
  });
  close(pipes[1]);
  std::string output(4096, '\0');
  output.resize(size_t(std::max<ssize_t>(read(pipes[0], output.data(), output.size()), 0)));
  close(pipes[0]);
  return output;
}

TEST(Config, NamesAreUniqueDocumentedAndFew) {
  std::set<std::string> names;
  for (const Variable& v : variables()) {
    EXPECT_TRUE(names.insert(v.name).second) << v.name;
    EXPECT_EQ(std::string(v.name).rfind("NVX_", 0), 0u);
    EXPECT_NE(std::string(v.meaning), "");
  }
  EXPECT_LE(names.size(), 25u);
}

TEST(Config, ReadsWhatIsSet) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string output =
      stderr_with({{"NVX_ALGO", "pipelined"}, {"NVX_STAGING_MB", "16"}, {"NVX_HOST_ID", "left"}}, [] {
        EXPECT_EQ(config().algorithm, "pipelined");
        EXPECT_EQ(config().staging_mb, 16);
        EXPECT_EQ(config().host_id, "left");
        EXPECT_EQ(config().on_error, "raise");
      });
  EXPECT_EQ(output, "");
}

TEST(Config, NamesUnreadableValues) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string output = stderr_with({{"NVX_STAGING_MB", "much"}}, [] { EXPECT_EQ(config().staging_mb, 30); });
  EXPECT_NE(output.find("NVX_STAGING_MB=much is not a number"), std::string::npos) << output;
}

/// The report of a wrong number, and the value that is used then.
TEST(Config, NamesNumbersOutOfRange) {
  struct Row {
    const char *name, *value, *fault;
  };
  constexpr Row kRows[] = {
      {"NVX_TIMEOUT_S", "-1", "less than 0"},
      {"NVX_TIMEOUT_S", "inf", "not a number"},
      {"NVX_TIMEOUT_S", "5 s", "not a number"},
      {"NVX_TIMEOUT_S", "2e9", "more than 1000000000"},
      {"NVX_TIMEOUT_S", "1.5", ""},
      {"NVX_TIMEOUT_S", "", ""},
      {"NVX_LIVENESS_S", "0", "less than 1"},
      {"NVX_LIVENESS_S", "2.5", ""},
      {"NVX_SPIN_US", "-2", "less than -1"},
      {"NVX_SPIN_US", "0", ""},
      {"NVX_SPIN_US", "1e3", ""},
      {"NVX_STAGING_MB", "1.5", "not a whole number"},
      {"NVX_STAGING_MB", "0", "less than 1"},
      {"NVX_STAGING_MB", "99999999999999999999", "more than 1000000000"},
      {"NVX_STAGING_MB", "0x10", "not a number"},
  };
  for (const Row& row : kRows) {
    const auto v = std::find_if(variables().begin(), variables().end(),
                                [&](const Variable& known) { return std::string(known.name) == row.name; });
    ASSERT_NE(v, variables().end());
    const char* before = getenv(row.name);
    const std::string kept = before ? before : "";
    setenv(row.name, row.value, 1);
    EXPECT_EQ(fault(*v), row.fault) << row.name << "=" << row.value;
    before ? setenv(row.name, kept.c_str(), 1) : unsetenv(row.name);
  }
}

TEST(Config, TakesFractionsOfSecondsAndNoNegativeTimes) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  using std::chrono::milliseconds;
  EXPECT_EQ(stderr_with({{"NVX_TIMEOUT_S", "1.5"}, {"NVX_LIVENESS_S", "2.25"}},
                        [] {
                          EXPECT_EQ(config().timeout, milliseconds(1500));
                          EXPECT_EQ(config().liveness, milliseconds(2250));
                        }),
            "");
  stderr_with({{"NVX_TIMEOUT_S", "0.0001"}}, [] { EXPECT_EQ(config().timeout, milliseconds(1)); });
  const std::string output =
      stderr_with({{"NVX_TIMEOUT_S", "-1"}}, [] { EXPECT_EQ(config().timeout, milliseconds(0)); });
  EXPECT_NE(output.find("NVX_TIMEOUT_S=-1 is less than 0; the default (0: the group's timeout) is used"),
            std::string::npos)
      << output;
}

TEST(Config, ReadsAnExponent) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  EXPECT_EQ(stderr_with({{"NVX_SPIN_US", "1e3"}}, [] { EXPECT_EQ(config().spin_us, 1000); }), "");
}

TEST(Config, NamesTheAcceptedValuesAndTheDefaultOfEachVariable) {
  std::map<std::string, std::string> takes, unset;
  for (const Variable& v : variables()) {
    takes[v.name] = accepted(v), unset[v.name] = default_of(v);
    EXPECT_NE(accepted(v), "") << v.name;
  }
  EXPECT_EQ(takes["NVX_DEBUG"], "warn, info, trace");
  EXPECT_EQ(takes["NVX_TIMEOUT_S"], "a number from 0 on");
  EXPECT_EQ(takes["NVX_SPIN_US"], "a whole number from -1 on");
  EXPECT_EQ(takes["NVX_HOST_ID"], "any text");
  EXPECT_EQ(unset["NVX_DEBUG"], "warn");
  EXPECT_EQ(unset["NVX_SPIN_US"], "-1: 200, or 0 where ranks outnumber cores");
  EXPECT_EQ(unset["NVX_CPU_LEVEL"], "unset: the best that the processor has");
}

TEST(Config, NamesUnknownVariables) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string output = stderr_with({{"NVX_ALGO", "fast"}, {"NVX_ON_ERROR", "Abort"}}, [] {
    EXPECT_EQ(config().algorithm, "");
    EXPECT_EQ(config().on_error, "abort");
  });
  EXPECT_NE(output.find("NVX_ALGO=fast is none of one_shot, pipelined; the default (unset: size and "),
            std::string::npos)
      << output;
}

TEST(Config, NamesUnreadableAddresses) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  for (const char* good : {"", "10.0.0.7, 10.1.0.0/16,fd00::/8", "0.0.0.0/0,::/0"})
    EXPECT_EQ(stderr_with({{"NVX_ALLOW_FROM", good}}, [&] { EXPECT_EQ(config().allow_from, good); }), "");
  for (const char* bad : {"10.0.0.7;eth0", "10.0.0.0/33", "host"}) {
    const std::string output = stderr_with({{"NVX_ALLOW_FROM", bad}}, [&] { EXPECT_EQ(config().allow_from, bad); });
    EXPECT_NE(output.find("NVX_ALLOW_FROM=" + std::string(bad) + " is not a list of addresses"), std::string::npos)
        << output;
  }
}

std::string list(const std::vector<DelegateRule>& all) {
  std::string text;
  for (const DelegateRule& one : all) text += one.collective + ">=" + std::to_string(one.least_bytes) + " ";
  return text;
}

TEST(Config, ReadsTheDelegateRules) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const struct {
    const char* set;
    const char* read;
  } kGood[] = {
      {"none", ""},
      {"all_reduce", "all_reduce>=0 "},
      {"all_reduce:64M,broadcast", "all_reduce>=67108864 broadcast>=0 "},
      {" reduce : 4k , all_gather:1G,reduce_scatter:100", "all_gather>=1073741824 reduce>=4096 reduce_scatter>=100 "},
  };
  for (const auto& good : kGood)
    EXPECT_EQ(stderr_with({{"NVX_DELEGATE", good.set}}, [&] { EXPECT_EQ(list(config().delegate), good.read); }), "");
  const char* const kBad[] = {"nccl",
                              "all_reduce>64M",
                              "all_reduce:",
                              "all_reduce:M",
                              "all_reduce:-1",
                              "all_reduce:4T",
                              "all_to_all",
                              "none,reduce",
                              "all_reduce,,",
                              "all_reduce,all_reduce",
                              ":4K",
                              "all_reduce:4KB",
                              "broadcast:1 M",
                              "all_reduce:99999999999G",
                              "reduce:99999999999999999999"};
  for (const char* bad : kBad) {
    const std::string output = stderr_with({{"NVX_DELEGATE", bad}}, [] { EXPECT_EQ(list(config().delegate), ""); });
    EXPECT_NE(output.find("NVX_DELEGATE=" + std::string(bad) + " is neither none nor a list"), std::string::npos)
        << bad << ": " << output;
  }
}

TEST(Config, EveryDefaultIsValidAndFaultsFollowTheEnvironment) {
  for (const Variable& v : variables()) {
    const char* before = getenv(v.name);
    const std::string kept = before ? before : "";
    unsetenv(v.name);
    EXPECT_EQ(fault(v), "") << v.name;
    setenv(v.name, "bla", 1);
    const bool any_text = !*v.takes;
    EXPECT_EQ(fault(v).empty(), any_text) << v.name;
    const bool words = v.name == std::string("NVX_DEBUG"), number = v.name == std::string("NVX_SPIN_US");
    EXPECT_TRUE(!words || fault(v) == "none of warn, info, trace") << fault(v);
    EXPECT_TRUE(!number || fault(v) == "not a number") << fault(v);
    if (before) {
      setenv(v.name, kept.c_str(), 1);
    } else {
      unsetenv(v.name);
    }
  }
}

TEST(Config, GuessesNothingFarFetched) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string output = stderr_with({{"NVX_TYPO", "1"}}, [] {});
  EXPECT_NE(output.find("NVX_TYPO is set"), std::string::npos) << output;
  EXPECT_EQ(output.find("did you mean"), std::string::npos) << output;
}

TEST(Config, WarnsOfUnknownNamesAndSuggestsTheNearest) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string output = stderr_with({{"NVX_TIMEOUT", "3"}}, [] {});
  EXPECT_NE(output.find("NVX_TIMEOUT is set"), std::string::npos) << output;
  EXPECT_NE(output.find("did you mean NVX_TIMEOUT_S?"), std::string::npos) << output;
}

TEST(Config, AgreedSettingsHaveAHashEach) {
  const Config one = config();
  std::array<Config, kAgreed.size()> other;
  other.fill(one);
  other[0].algorithm = "one_shot";
  other[1].tune = "lease=1M";
  other[2].delegate = {{"all_reduce", 1 << 20}};
  other[3].kernels = Kernels::kAlways;
  other[4].nvls = !one.nvls;
  for (size_t i = 0; i < kAgreed.size(); ++i) {
    Agreed same = other[i].agreed();
    EXPECT_NE(same[i], one.agreed()[i]) << kAgreed[i];
    same[i] = one.agreed()[i];
    EXPECT_EQ(same, one.agreed());
    EXPECT_TRUE(std::ranges::any_of(variables(), [&](const Variable& v) { return v.name == std::string(kAgreed[i]); }));
  }
  Config later = other[2];
  later.delegate[0].least_bytes *= 2;
  EXPECT_NE(later.agreed(), other[2].agreed());
  Config silent = one;
  silent.debug = "trace";
  EXPECT_EQ(silent.agreed(), one.agreed());
}

TEST(Hash, DependsOnOrderAndBorders) {
  EXPECT_NE(Hash().add(1).add(2).value(), Hash().add(2).add(1).value());
  EXPECT_NE(Hash().add("ab").add("c").value(), Hash().add("a").add("bc").value());
  EXPECT_NE(Hash().add("").value(), Hash().value());
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 10'000; ++i) seen.insert(Hash().add(i).value());
  EXPECT_EQ(seen.size(), 10'000u);
}

TEST(Status, SuccessHoldsNothingAndFailureItsText) {
  const Status good;
  EXPECT_TRUE(good.ok());
  const Status bad(Code::kPeerDied, "nvx: gone");
  const Status copy = bad;
  EXPECT_FALSE(copy.ok());
  EXPECT_EQ(copy.code(), Code::kPeerDied);
  EXPECT_EQ(copy.what(), "nvx: gone");
  for (int c = 0; c <= int(Code::kSystem); ++c) EXPECT_STRNE(name(Code(c)), "unknown");
}

TEST(Fd, ClosesOnceAndMoves) {
  int pipes[2];
  ASSERT_EQ(pipe(pipes), 0);
  Fd reader(pipes[0]);
  {
    Fd writer(pipes[1]);
    Fd moved(std::move(writer));
    EXPECT_FALSE(writer);  // NOLINT: what a moved-from handle must be
    EXPECT_EQ(moved.get(), pipes[1]);
  }
  char byte;
  EXPECT_EQ(read(reader.get(), &byte, 1), 0) << "the writing end is still open";
}

}  // namespace
}  // namespace nvx::test
