// What ranks tell each other through the store, and what is made of it.

#include "group/topology.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "base/error.h"

namespace nvx {
namespace {

std::vector<Hello> hellos(int ranks) {
  std::vector<Hello> all;
  for (int r = 0; r < ranks; ++r) all.push_back(describe_self(r));
  return all;
}

void expect_refused(const std::vector<Hello>& ranks, const char* says) {
  try {
    Topology::from(ranks);
    FAIL() << "not refused: " << says;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
  }
}

TEST(Topology, WhatIsEncodedIsDecoded) {
  const std::vector<Hello> told = hellos(3);
  const std::vector<Hello> heard = decode(encode(told), 3);
  ASSERT_EQ(heard.size(), 3u);
  EXPECT_EQ(std::memcmp(told.data(), heard.data(), 3 * sizeof(Hello)), 0);
}

TEST(Topology, TellsOfThisMachine) {
  const Hello hello = describe_self(7);
  EXPECT_EQ(hello.rank, 7);
  EXPECT_EQ(hello.pid, getpid());
  EXPECT_GE(hello.cores, 1u);
  EXPECT_NE(hello.nonce, describe_self(7).nonce);
  EXPECT_EQ(hello.host, describe_self(3).host);
}

TEST(Topology, DamagedValuesAreRefused) {
  const std::vector<uint8_t> good = encode(hellos(2));
  EXPECT_THROW((void)decode(good, 3), Error);
  EXPECT_THROW((void)decode({good.data(), good.size() - 1}, 2), Error);
  EXPECT_THROW((void)decode({}, 1), Error);
  for (const size_t byte : {offsetof(Hello, magic), offsetof(Hello, wire), offsetof(Hello, bytes)}) {
    std::vector<uint8_t> bad = good;
    bad[sizeof(Hello) + byte] ^= 0x10;
    EXPECT_THROW((void)decode(bad, 2), Error) << byte;
  }
  for (const size_t field : {offsetof(Hello, host_name), offsetof(Hello, door), offsetof(Hello, version)}) {
    std::vector<uint8_t> bad = good;
    std::memset(bad.data() + field, 'x',
                field == offsetof(Hello, version) ? sizeof(Hello::version) : sizeof(Hello::door));
    EXPECT_THROW((void)decode(bad, 2), Error) << field;
  }
}

TEST(Topology, RanksThatDoNotBelongTogetherAreRefusedAndNamed) {
  std::vector<Hello> twice = hellos(2);
  twice[1].rank = 0;
  expect_refused(twice, "say that they are rank 0");
  std::vector<Hello> apart = hellos(3);
  apart[2].host ^= 1;
  EXPECT_EQ(Topology::from(apart).hosts.size(), 2u);
  std::vector<Hello> otherwise = hellos(2);
  otherwise[1].plan_hash ^= 1;
  expect_refused(otherwise, "NVX_ALGO");
}

TEST(Topology, EverybodyCountsOnTheLeast) {
  std::vector<Hello> ranks = hellos(3);
  for (size_t i = 0; i < 3; ++i)
    ranks[i].cores = uint32_t(8 - i), ranks[i].l3_bytes = (64 - i) << 20, ranks[i].l2_bytes = (2 + i) << 20;
  const Topology topology = Topology::from(ranks);
  EXPECT_EQ(topology.cores, 6u);
  EXPECT_EQ(topology.l3_bytes, size_t(62) << 20);
  EXPECT_EQ(topology.l2_bytes, size_t(2) << 20);
}

}  // namespace
}  // namespace nvx
