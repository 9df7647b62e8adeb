// The values that plans decide by: their defaults, as a table, and what users set instead.

#include "group/plan/tuning.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "group/plan/plan.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

constexpr uint64_t kAny = uint64_t(1) << 40;

/// With 2, 4, 8 and 16 ranks on a host. Between them the next larger count decides.
struct ExpectedDefault {
  const char* key;
  uint64_t by_2, by_4, by_8, by_16;
};
// clang-format off
constexpr ExpectedDefault kDefaults[] = {
    {"all_reduce.one_shot",             64 * K, 16 * K, 16 * K, 16 * K},
    {"reduce.one_shot",                 32 * K, 16 * K, 16 * K, 16 * K},
    {"reduce_scatter.one_shot",         64 * K, 64 * K, 64 * K, 64 * K},
    {"all_gather.one_shot",             64 * K, 64 * K, 64 * K, 64 * K},
    {"broadcast.one_shot",              64 * K, 64 * K, 64 * K, 64 * K},
    {"lease",                                0,      0,      0,      0},
    {"send.lease",                       2 * M,  2 * M,  2 * M,  2 * M},
    {"past_caches",                          0,      0,      0,      0},
    {"all_reduce.fewest_steps",         16 * K, 16 * K, 16 * K, 16 * K},
    {"reduce.fewest_steps",             64 * K, 64 * K, 64 * K, 64 * K},
    {"reduce_scatter.fewest_steps",     16 * K, 16 * K, 16 * K, 16 * K},
    {"all_gather.fewest_steps",         16 * K, 16 * K, 16 * K, 16 * K},
    {"broadcast.fewest_steps",          64 * K, 64 * K, 64 * K, 64 * K},
    {"all_reduce.ring_hosts",                2,      2,      2,      2},
    {"reduce_scatter.ring_hosts",            2,      2,      2,      2},
    {"all_gather.direct_hosts",             16,     16,     16,     16},
    {"all_gather.packed",               16 * K, 16 * K, 16 * K, 16 * K},
    {"slice",                          504 * K, 504 * K, 504 * K, 504 * K},
    {"kernels.blocks",                      24,     24,     24,     24},
    {"kernels.pad",                     16 * M, 16 * M, 16 * M, 16 * M},
    {"kernels.packets",                      0,      0,      0,      0},
    {"kernels.chunk",                        0,      0,      0,      0},
    {"kernels.one_shot",                  kAny, 64 * K, 32 * K, 16 * K},
    {"kernels.two_shot",                  kAny,   kAny,   kAny,   kAny},
    {"kernels.piece",                     kAny,   kAny,   kAny,   kAny},
};
// clang-format on

TEST(Tuning, DefaultsAreThisTable) {
  ASSERT_EQ(std::size(kDefaults), tune_rows().size());
  std::set<std::string> names;
  for (size_t i = 0; i < std::size(kDefaults); ++i) {
    const TuneRow& row = tune_rows()[i];
    const ExpectedDefault& e = kDefaults[i];
    EXPECT_STREQ(row.name, e.key);
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    const std::pair<size_t, uint64_t> kByRanks[] = {{1, e.by_2}, {2, e.by_2}, {3, e.by_4},  {4, e.by_4},
                                                    {5, e.by_8}, {8, e.by_8}, {9, e.by_16}, {1000, e.by_16}};
    for (const auto& [ranks, value] : kByRanks) {
      EXPECT_EQ(Tuning().of(row.key, ranks), value) << row.name << " of " << ranks;
      const bool derived = value == 0;
      EXPECT_TRUE(derived || (value >= row.least && value <= row.most && value % row.multiple == 0)) << row.name;
    }
    EXPECT_EQ(Tuning().set_by(row.key), SetBy::kDefault);
  }
}

struct ExpectedOfLink {
  GpuLink link;
  ExpectedDefault row;
};
// clang-format off
constexpr ExpectedOfLink kOfLinks[] = {
    {GpuLink::kOneGpu, {"kernels.one_shot",   kAny, 128 * K,  64 * K,  16 * K}},
    {GpuLink::kOneGpu, {"kernels.two_shot",   kAny,    kAny,    kAny, 256 * K}},
    {GpuLink::kPcie,   {"kernels.blocks",        8,       8,       8,       8}},
    {GpuLink::kPcie,   {"kernels.one_shot", 512 * K,  24 * K,   8 * K,   2 * K}},
    {GpuLink::kPcie,   {"kernels.two_shot", 512 * K, 384 * K, 320 * K, 256 * K}},
    {GpuLink::kPcie,   {"kernels.piece",    512 * K, 192 * K,  96 * K,  32 * K}},
};
// clang-format on

TEST(Tuning, LinksBetweenGpusDifferInThisTableOnly) {
  for (const GpuLink link : {GpuLink::kOneGpu, GpuLink::kNvlink, GpuLink::kPcie}) {
    for (size_t i = 0; i < std::size(kDefaults); ++i) {
      const TuneRow& row = tune_rows()[i];
      ExpectedDefault e = kDefaults[i];
      for (const ExpectedOfLink& other : kOfLinks) {
        if (other.link == link && std::string(other.row.key) == e.key) e = other.row;
      }
      const std::pair<size_t, uint64_t> kByRanks[] = {{2, e.by_2}, {4, e.by_4}, {8, e.by_8}, {16, e.by_16}};
      for (const auto& [ranks, value] : kByRanks)
        EXPECT_EQ(Tuning().of(row.key, ranks, link), value) << row.name << " of " << ranks << ", " << name(link);
      Tuning own;
      own.set(row.key, row.most);
      EXPECT_EQ(own.of(row.key, 8, link), row.most) << row.name << ": a user's value counts over every link";
      EXPECT_EQ(row.is_of_gpus(), std::string(row.name).starts_with("kernels.")) << row.name;
    }
  }
}

const Overrides::Read kNoFile = [](const std::string&) { return std::nullopt; };

Overrides overrides_of(const std::string& variable, const std::string& option = "",
                       const std::map<std::string, std::string>& files = {}) {
  const Overrides::Read read = [&](const std::string& path) -> std::optional<std::string> {
    const auto file = files.find(path);
    return file == files.end() ? std::nullopt : std::optional(file->second);
  };
  Overrides overrides;
  overrides.add(variable, SetBy::kVariable, "NVX_TUNE", read);
  overrides.add(option, SetBy::kOption, "nvx.Options(tune=...)", read);
  return overrides;
}

std::string refused(const std::string& list) {
  try {
    Overrides().add(list, SetBy::kVariable, "NVX_TUNE", kNoFile);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kInvalid);
    return error.what();
  }
  return "";
}

TEST(Tuning, TheBoundsAreAllowedAndNothingBeyondThem) {
  for (const TuneRow& row : tune_rows()) {
    const auto with = [&](uint64_t value) { return std::string(row.name) + "=" + std::to_string(value); };
    EXPECT_EQ(refused(with(row.least)), "");
    EXPECT_EQ(refused(with(row.most)), "");
    const std::string bounds = "is not a number from " + std::to_string(row.least) + " to " + std::to_string(row.most);
    EXPECT_NE(refused(with(row.most + 1)).find("nvx: NVX_TUNE: " + with(row.most + 1) + " " + bounds),
              std::string::npos);
    if (row.least > 0) {
      EXPECT_NE(refused(with(row.least - 1)).find(bounds), std::string::npos);
    }
    if (row.multiple > 1) {
      EXPECT_NE(refused(with(row.most - 1)).find("a multiple of "), std::string::npos);
    }
  }
}

TEST(Tuning, MalformedSettingIsRefusedWithTheNearestKey) {
  for (const char* item : {"all_reduce", "=1", "ALL_REDUCE.one_shot=1", "one_shot=1", "lease=", "lease=-1",
                           "lease=1.5M", "lease=much", "lease=1M=2", "lease=99999999999999999999"}) {
    const std::string text = refused(std::string("slice=504K, ") + item);
    EXPECT_TRUE(text.starts_with("nvx: NVX_TUNE: ")) << item << ": " << text;
    EXPECT_TRUE(text.ends_with(". Next: `NVX_TUNE= nvx explain` lists the keys and their bounds"))
        << item << ": " << text;
  }
  const auto starts = [](const std::string& item, const std::string& why) {
    EXPECT_TRUE(refused(item).starts_with("nvx: NVX_TUNE: there is no key " + why + ". Next: ")) << refused(item);
  };
  starts("leese=1M", "\"leese\" (did you mean lease?)");
  starts("allreduce.oneshot=1", "\"allreduce.oneshot\" (did you mean all_reduce.one_shot?)");
  starts("kernels.blocks =1,kernel.block=1", "\"kernel.block\" (did you mean kernels.blocks?)");
  starts("bad_key=1", "\"bad_key\"");
  EXPECT_NE(refused("@nowhere").find("names nowhere, which cannot be read. Next: give the path"), std::string::npos);
}

TEST(Tuning, AnOptionCountsBeforeTheVariableBeforeAFile) {
  const std::map<std::string, std::string> files = {
      {"two",
       "# made by hand\nranks = 2\nhost = a, b\nlease = 1M  # best of three\nslice=64K\nall_reduce.one_shot = 1\n"},
      {"four", "ranks = 4\nlease = 3M\n"},
      {"any", "kernels.blocks = 7\n"}};
  const Overrides all = overrides_of("slice=128K, @two,@four,@any", "all_reduce.one_shot=2,slice=192K", files);
  const Tuning two = all.of(2), four = all.of(4);
  EXPECT_EQ(two.of(Tune::kLease, 2), 1 * M);
  EXPECT_EQ(two.set_by(Tune::kLease), SetBy::kFile);
  EXPECT_EQ(four.of(Tune::kLease, 4), 3 * M);
  EXPECT_EQ(two.of(Tune::kSlice, 2), 192 * K);
  EXPECT_EQ(two.set_by(Tune::kSlice), SetBy::kOption);
  EXPECT_EQ(two.of(Tune::kAllReduceOneShot, 2), 2u);
  EXPECT_EQ(two.of(Tune::kBlocks, 2), 7u);
  EXPECT_EQ(overrides_of("slice=128K,@two", "", files).of(2).set_by(Tune::kSlice), SetBy::kVariable);
  EXPECT_EQ(two.set_by(Tune::kReduceOneShot), SetBy::kDefault);
  EXPECT_EQ(four.text(),
            "all_reduce.one_shot=2 (option), lease=3145728 (file), slice=196608 (option), kernels.blocks=7 (file)");
  EXPECT_STREQ(name(two.set_by(Tune::kSlice)), "option");
}

TEST(Tuning, AFileForTheseRanksCountsBeforeAFileForAny) {
  const std::map<std::string, std::string> files = {{"two", "ranks = 2\nlease = 1M\n"},
                                                    {"any", "lease = 2M\nslice = 64K\n"}};
  for (const char* list : {"@two,@any", "@any,@two"}) {
    const Overrides both = overrides_of(list, "", files);
    EXPECT_EQ(both.of(2).of(Tune::kLease, 2), 1 * M) << list;
    EXPECT_EQ(both.of(2).of(Tune::kSlice, 2), 64 * K) << list;
    EXPECT_EQ(both.of(4).of(Tune::kLease, 4), 2 * M) << list;
    EXPECT_EQ(overrides_of(std::string("lease=3M,") + list, "", files).of(2).of(Tune::kLease, 2), 3 * M) << list;
    EXPECT_EQ(overrides_of(list, "lease=4M", files).of(2).of(Tune::kLease, 2), 4 * M) << list;
  }
}

TEST(Tuning, ALineOfAFileIsOneSetting) {
  const auto why = [](const std::string& content) -> std::string {
    try {
      overrides_of("@file", "", {{"file", content}});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const Overrides crlf =
      overrides_of("@file", "", {{"file", "nvx = " NVX_VERSION "\r\nranks = 2\r\n\r\nlease = 1M\r\n"}});
  EXPECT_EQ(crlf.text(), "lease=1048576 for 2 ranks");
  EXPECT_TRUE(why("lease = 1M, slice = 64K\n").starts_with("nvx: file: lease=1M, slice = 64K is not a number from "));
  for (const char* ranks : {"none", "0", "2, 4"}) {
    EXPECT_EQ(why(std::string("ranks = ") + ranks + "\n"),
              std::string("nvx: file: ranks = ") + ranks +
                  " is not a number from 1 on. Next: correct the line, or run `nvx tune` again");
  }
  EXPECT_EQ(why(""), "");
}

TEST(Tuning, AFileIsForItsOwnRanksAndVersion) {
  const std::map<std::string, std::string> files = {{"two", "nvx = " NVX_VERSION "\nranks = 2\nlease = 1M\n"},
                                                    {"old", "nvx = 0.0.1\nranks = 2\nno_such_key = 1\n"},
                                                    {"bad", "ranks = none\n"},
                                                    {"wrong", "ranks = 2\nlease = 1\n"}};
  const Overrides two = overrides_of("@two", "", files);
  EXPECT_FALSE(two.misses(2));
  EXPECT_TRUE(two.misses(4));
  EXPECT_EQ(two.of(4).set_by(Tune::kLease), SetBy::kDefault);
  testing::internal::CaptureStderr();
  const Overrides old = overrides_of("@old", "", files);
  const std::string output = testing::internal::GetCapturedStderr();
  EXPECT_NE(output.find("old was written by `nvx tune` of nvx 0.0.1"), std::string::npos) << output;
  EXPECT_EQ(old.text(), "");
  EXPECT_FALSE(old.misses(4));
  EXPECT_THROW(overrides_of("@bad", "", files), Error);
  EXPECT_THROW(overrides_of("@wrong", "", files), Error);
}

/// Ranks compare this text: it names values, not where they come from.
TEST(Tuning, TheTextIsThatOfTheValues) {
  const std::map<std::string, std::string> files = {{"a", "ranks = 2\nlease = 1M\n"},
                                                    {"b", "lease = 1024K\nranks = 2"}};
  EXPECT_EQ(overrides_of("@a", "", files).text(), "lease=1048576 for 2 ranks");
  EXPECT_EQ(overrides_of("@b", "", files).text(), overrides_of("@a", "", files).text());
  EXPECT_EQ(overrides_of("slice=64K,lease=1M").text(), "lease=1048576, slice=65536");
  EXPECT_EQ(overrides_of("lease=1M", "slice=64K").text(), overrides_of("slice=64K,lease=1M").text());
  EXPECT_EQ(overrides_of("").text(), "");
}

TEST(Tuning, DecidesBetweenHostsToo) {
  PlanFacts facts{.ranks = 2, .hosts = 4, .rails = 2, .world = 8};
  const auto chosen = [&](schedule::Collective c, size_t bytes) {
    return std::string(plan_between(c, bytes, facts).row->name);
  };
  using Across = schedule::Collective;
  EXPECT_EQ(chosen(Across::kAllReduce, 16 * K), "recursive_doubling");
  facts.tuning.set(Tune::kAllReduceFewestSteps, 100);
  facts.tuning.set(Tune::kReduceFewestSteps, 100);
  facts.tuning.set(Tune::kBroadcastFewestSteps, 100);
  EXPECT_EQ(chosen(Across::kAllReduce, 100), "recursive_doubling");
  EXPECT_EQ(chosen(Across::kAllReduce, 101), "ring");
  EXPECT_EQ(chosen(Across::kReduce, 101), "ring_gather");
  EXPECT_EQ(chosen(Across::kBroadcast, 1 * M), "scatter_all_gather");
  facts.tuning.set(Tune::kAllGatherDirectHosts, 3);
  EXPECT_EQ(chosen(Across::kAllGather, 1 * M), "ring");
  EXPECT_EQ(chosen(Across::kAllGather, 16 * K), "bruck");
  for (const Across collective : {Across::kReduce, Across::kBroadcast}) {
    EXPECT_EQ(chosen(collective, 2016 * K), "chain");
    EXPECT_EQ(plan_between(collective, 2016 * K, facts).slice, 504 * K);
    facts.tuning.set(Tune::kSlice, 1 * M);
    EXPECT_NE(chosen(collective, 2016 * K), "chain");
    facts.tuning.set(Tune::kSlice, 504 * K);
  }
  facts.hosts = 8;
  EXPECT_EQ(chosen(Across::kAllReduce, 100 * K), "halving_doubling");
  EXPECT_EQ(chosen(Across::kReduceScatter, 100 * K), "halving");
  facts.tuning.set(Tune::kAllReduceRingHosts, 8);
  facts.tuning.set(Tune::kReduceScatterRingHosts, 8);
  EXPECT_EQ(chosen(Across::kAllReduce, 100 * K), "ring");
  EXPECT_EQ(chosen(Across::kReduceScatter, 100 * K), "ring");
  EXPECT_EQ(policy_to_keep(1 * M, facts), kernel::CachePolicy::kCached);
  facts.tuning.set(Tune::kPastCaches, 1 * M);
  EXPECT_EQ(policy_to_keep(1 * M, facts), kernel::CachePolicy::kPast);
}

}  // namespace
}  // namespace nvx::test
