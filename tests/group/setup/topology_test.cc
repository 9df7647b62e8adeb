// The data that ranks exchange through the store, and the topology derived from it.

#include "group/setup/topology.h"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "base/error.h"

namespace nvx {
namespace {

std::vector<Hello> hellos(int ranks) {
  std::vector<Hello> all;
  for (int r = 0; r < ranks; ++r) all.push_back(describe_self(r));
  return all;
}

void expect_refused(const std::vector<Hello>& ranks, const std::string& reason) {
  try {
    Topology::from(ranks);
    FAIL() << "not refused: " << reason;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
  }
}

TEST(Topology, EncodedHellosDecodeUnchanged) {
  const std::vector<Hello> sent = hellos(3);
  const std::vector<Hello> received = decode(encode(sent), 3);
  ASSERT_EQ(received.size(), 3u);
  EXPECT_EQ(std::memcmp(sent.data(), received.data(), 3 * sizeof(Hello)), 0);
}

TEST(Topology, DescribesThisMachine) {
  const Hello hello = describe_self(7);
  EXPECT_EQ(hello.rank, 7);
  EXPECT_EQ(hello.pid, getpid());
  EXPECT_GE(hello.cores, 1u);
  EXPECT_NE(hello.nonce, describe_self(7).nonce);
  EXPECT_EQ(hello.host, describe_self(3).host);
}

TEST(Topology, RanksOfOneHostAreOfOneMachine) {
  std::vector<Hello> all = hellos(3);
  all[2].machine ^= 1;
  expect_refused(all, "rank 0 (pid");
  expect_refused(all, "rank 2 (pid");
  expect_refused(all, "NVX_HOST_ID");
  all[2].host ^= 1;
  EXPECT_EQ(Topology::from(all).hosts.size(), 2u);
}

TEST(Topology, ARankWithoutMachineIdIsPlacedByItsHostIdOrNamed) {
  std::vector<Hello> all = hellos(3);
  all[2].machine = 0;
  EXPECT_EQ(Topology::from(all).hosts.size(), 1u);
  EXPECT_EQ(Topology::from(all).host_warning(), "");
  all[2].host ^= 1;
  const std::string warning = Topology::from(all).host_warning();
  EXPECT_TRUE(warning.starts_with("rank 2 (pid ")) << warning;
  EXPECT_NE(warning.find("so it counts as on another host than rank 0 (pid "), std::string::npos) << warning;
  std::strcpy(all[2].host_name, "elsewhere");
  EXPECT_EQ(Topology::from(all).host_warning(), "");
}

TEST(Topology, NamesTheGlobalRankWhereItDiffers) {
  Topology topology = Topology::from(hellos(3));
  const std::string before = topology.describe(1);
  EXPECT_TRUE(before.starts_with("rank 1 (pid ")) << before;
  topology.global_ranks = {4, 1, 7};
  EXPECT_EQ(topology.describe(1), before);
  EXPECT_TRUE(topology.describe(2).starts_with("rank 2 (global rank 7, pid ")) << topology.describe(2);
  EXPECT_EQ(rank_name(0, topology.global_ranks), "rank 0 (global rank 4)");
  EXPECT_EQ(rank_name(0, {}), "rank 0");
}

TEST(Topology, DamagedValuesAreRefused) {
  const std::vector<uint8_t> good = encode(hellos(2));
  EXPECT_THROW((void)decode(good, 3), Error);
  EXPECT_THROW((void)decode({good.data(), good.size() - 1}, 2), Error);
  EXPECT_THROW((void)decode({}, 1), Error);
  for (const size_t byte : {offsetof(Hello, magic), offsetof(Hello, wire_version), offsetof(Hello, bytes)}) {
    std::vector<uint8_t> bad = good;
    bad[sizeof(Hello) + byte] ^= 0x10;
    EXPECT_THROW((void)decode(bad, 2), Error) << byte;
  }
  for (const size_t field : {offsetof(Hello, host_name), offsetof(Hello, socket)}) {
    std::vector<uint8_t> bad = good;
    std::memset(bad.data() + field, 'x', sizeof(Hello::socket));
    EXPECT_THROW((void)decode(bad, 2), Error) << field;
  }
}

/// A table of another world size is the most frequent wrong value in a store.
TEST(Topology, AnotherWorldSizeIsAnError) {
  try {
    (void)decode(encode(hellos(2)), 3);
    FAIL() << "taken for one of three";
  } catch (const Error& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "nvx: rank 0 (" + place_of(hellos(2)[0]) +
            ") creates this group with 2 ranks, this rank with 3. Next: give all ranks the same world size, or list of "
            "ranks");
  }
  const std::vector<uint8_t> noise(2 * sizeof(Hello), 'x');
  try {
    (void)decode(noise, 3);
    FAIL() << "noise is taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("something else wrote there"), std::string::npos) << error.what();
  }
}

/// A rank that cannot read its host's identity would count as a host of its own, and would wait for a network.
TEST(Topology, AProcessThatMayOpenNoFileIsNotTakenForAnotherHost) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  std::string text;
  try {
    (void)describe_self(0);
  } catch (const Error& error) {
    text = error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(text.find("the boot id of this host: Too many open files. Next: raise"), std::string::npos) << text;
}

TEST(Topology, RanksThatDoNotBelongTogetherAreRefusedAndNamed) {
  std::vector<Hello> twice = hellos(2);
  twice[1].rank = 0;
  expect_refused(twice, "two processes have rank 0");
  std::vector<Hello> apart = hellos(3);
  apart[2].host ^= 1;
  EXPECT_EQ(Topology::from(apart).hosts.size(), 2u);
  std::vector<Hello> otherwise = hellos(2);
  otherwise[1].agreed[1] ^= 1;
  expect_refused(otherwise, "differ in NVX_TUNE. Next: set the variable to the same value on all ranks");
  otherwise[1].agreed[2] ^= 1;
  expect_refused(otherwise, "differ in NVX_TUNE; NVX_DELEGATE.");
}

/// Of lists, only the items that differ are named.
TEST(Topology, RanksThatDifferInAVariableGetBothValues) {
  std::vector<Hello> ranks = hellos(3);
  const auto cause_of = [&](const std::string& first, const std::string& last) {
    try {
      Topology::from(ranks, [&](int rank) { return rank == 0 ? first : rank == 2 ? last : "never queried"; });
    } catch (const Error& error) {
      return error.failure().cause;
    }
    return std::string("not refused");
  };
  const std::string differ =
      Topology::from(ranks).describe(2) + " and " + Topology::from(ranks).describe(0) + " differ in ";
  ranks[2].agreed[0] ^= 1;
  const std::string forced = differ + "NVX_ALGO: rank 0 has one_shot, rank 2 ";
  EXPECT_EQ(cause_of("one_shot\n\n\nauto\n0\n", "pipelined\n\n\nauto\n0\n"), forced + "has pipelined");
  EXPECT_EQ(cause_of("one_shot\n\n\nauto\n0\n", "\n\n\nauto\n0\n"), forced + "does not");
  EXPECT_EQ(cause_of("\n\n\nauto\n0\n", "one_shot\n\n\nauto\n0\n"),
            differ + "NVX_ALGO: rank 2 has one_shot, rank 0 does not");
  ranks[2].agreed = ranks[0].agreed;
  ranks[2].agreed[1] ^= 1, ranks[2].agreed[3] ^= 1;
  EXPECT_EQ(cause_of("\nlease=1, slice=2\n\nauto\n0\n", "\nslice=2, lease=3\n\n1\n0\n"),
            differ + "NVX_TUNE: rank 0 has lease=1, rank 2 has lease=3; NVX_KERNELS: rank 0 has auto, rank 2 has 1");
  EXPECT_EQ(cause_of("", "\nslice=2\n\n1\n0\n"), differ + "NVX_TUNE; NVX_KERNELS") << "the store has lost one";
  const std::string text = cause_of("\n\x1b" + std::string(300, 'x') + "\n\nauto\n0\n", "\nslice=2\n\n1\n0\n");
  EXPECT_TRUE(text.starts_with(differ + "NVX_TUNE: rank 0 has  " + std::string(199, 'x') + "..., rank 2 ")) << text;
}

TEST(Topology, RanksWithDifferentJobKeysAreRefusedAndNamed) {
  std::vector<Hello> ranks = hellos(3);
  for (Hello& hello : ranks) hello.key_tag = 5;
  EXPECT_EQ(Topology::from(ranks).ranks.size(), 3u);
  ranks[2].key_tag = 6;
  expect_refused(ranks, Topology::from(hellos(3)).describe(2) + " and " + Topology::from(hellos(3)).describe(0) +
                            " have different keys in NVX_JOB_KEY. Next: set the same NVX_JOB_KEY on all ranks");
  ranks[2].key_tag = 0;
  expect_refused(ranks, Topology::from(hellos(3)).describe(0) + " has an NVX_JOB_KEY, and " +
                            Topology::from(hellos(3)).describe(2) + " has none.");
  for (Hello& hello : ranks) hello.key_tag = hello.rank == 1 ? 5 : 0;
  expect_refused(ranks, " has an NVX_JOB_KEY, and " + Topology::from(hellos(3)).describe(0) + " has none.");
}

/// The description fits one line of a log for any number of hosts.
TEST(Topology, DescribesItself) {
  const auto spread = [](std::vector<uint64_t> hosts) {
    std::vector<Hello> ranks = hellos(int(hosts.size()));
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].host = hosts[r];
      std::snprintf(ranks[r].host_name, sizeof ranks[r].host_name, "h%d", int(hosts[r]));
    }
    return Topology::from(std::move(ranks)).describe();
  };
  EXPECT_EQ(spread({7}), "1 rank on host h7");
  EXPECT_EQ(spread({7, 7}), "2 ranks on host h7");
  EXPECT_EQ(spread({7, 8, 7}), "3 ranks on 2 hosts: 2 on h7, 1 on h8");
  EXPECT_EQ(spread({1, 2, 3, 4, 5, 6}), "6 ranks on 6 hosts: 1 on h1, 1 on h2, 1 on h3, 1 on h4, ...");
}

TEST(Topology, CachesAreTheLeastOfAllRanks) {
  std::vector<Hello> ranks = hellos(3);
  for (size_t i = 0; i < 3; ++i) ranks[i].l3_bytes = (64 - i) << 20, ranks[i].l2_bytes = (2 + i) << 20;
  const Topology topology = Topology::from(ranks);
  EXPECT_EQ(topology.l3_bytes, size_t(62) << 20);
  EXPECT_EQ(topology.l2_bytes, size_t(2) << 20);
}

/// Launchers may bind each rank to some of a host's cores.
TEST(Topology, CoresAreThoseOfAllRanksOfAHost) {
  const auto cores = [](std::vector<std::pair<uint32_t, uint32_t>> of_ranks, int on_first_host) {
    std::vector<Hello> ranks = hellos(int(of_ranks.size()));
    for (size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].host = int(r) < on_first_host ? 1 : 2;
      ranks[r].cores = of_ranks[r].first, ranks[r].affinity = of_ranks[r].second;
    }
    return Topology::from(std::move(ranks)).cores;
  };
  using Cores = std::vector<size_t>;
  EXPECT_EQ(cores({{8, 5}, {8, 5}, {8, 5}}, 3), Cores{8}) << "all may use all";
  EXPECT_EQ(cores({{4, 5}, {4, 7}, {2, 9}}, 3), Cores{10}) << "each is bound to its own";
  EXPECT_EQ(cores({{2, 0}, {3, 0}}, 2), Cores{2}) << "a quota limits all";
  EXPECT_EQ(cores({{64, 5}, {64, 5}, {8, 7}}, 2), (Cores{64, 8})) << "each host has its own";
}

}  // namespace
}  // namespace nvx
