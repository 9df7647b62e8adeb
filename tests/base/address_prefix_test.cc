// Addresses and prefixes as users write them, and lists of them that are made shorter.
#include "base/address_prefix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace nvx::test {
namespace {

using testing::ElementsAre;

std::vector<AddressPrefix> prefixes(const std::string& list) { return parse_prefixes(list).value(); }

std::vector<std::string> texts(const std::vector<AddressPrefix>& all) {
  std::vector<std::string> written;
  for (const AddressPrefix& prefix : all) written.push_back(prefix.text());
  return written;
}

TEST(AddressPrefix, IsReadAndWritten) {
  EXPECT_THAT(texts(prefixes("10.0.0.7, 10.1.2.3/16,fd00::1/8,::1")),
              ElementsAre("10.0.0.7", "10.1.0.0/16", "fd00::/8", "::1"));
  EXPECT_THAT(texts(prefixes("0.0.0.0/0,::/0")), ElementsAre("0.0.0.0/0", "::/0"));
  EXPECT_TRUE(prefixes("").empty());
  for (const char* wrong : {"10.0.0", "10.0.0.1/33", "::1/129", "10.0.0.1/", "10.0.0.1/x", "eth0", "10.0.0.1/-1", "/8"})
    EXPECT_FALSE(parse_prefixes(wrong)) << wrong;
}

TEST(AddressPrefix, AreMergedWithoutLossWhileThatSuffices) {
  std::string list = "fd00::1";
  for (int i = 0; i < 256; ++i) list += ",10.0.0." + std::to_string(i);
  EXPECT_THAT(texts(merged(prefixes(list), 512)), ElementsAre("10.0.0.0/24", "fd00::1"));
  EXPECT_THAT(texts(merged(prefixes("10.0.0.9,10.0.0.0/8,10.0.0.9,11.0.0.1"), 512)),
              ElementsAre("10.0.0.0/8", "11.0.0.1"));
  EXPECT_THAT(texts(merged(prefixes("10.0.0.1,10.0.0.2"), 512)), ElementsAre("10.0.0.1", "10.0.0.2"));
}

TEST(AddressPrefix, ThatAreTooManyAreMergedWhereTheyHaveMostInCommon) {
  EXPECT_THAT(texts(merged(prefixes("10.0.0.1,10.0.0.2,10.9.0.1,192.168.0.1,fd00::1"), 4)),
              ElementsAre("10.0.0.0/30", "10.9.0.1", "192.168.0.1", "fd00::1"));
  EXPECT_THAT(texts(merged(prefixes("10.0.0.1,192.168.0.1,fd00::1,fe00::1"), 1)), ElementsAre("0.0.0.0/0", "fc00::/6"));
  std::vector<AddressPrefix> many;
  uint32_t x = 1;
  for (int i = 0; i < 3000; ++i) {
    x = x * 1664525u + 1013904223u;
    const bool v4 = i % 3 != 0;
    AddressBytes bytes{};
    if (v4) bytes[10] = bytes[11] = 0xff;
    for (size_t at = v4 ? 12 : 0; at < 16; ++at) bytes[at] = uint8_t((x >> at) ^ (x * at));
    many.push_back(AddressPrefix::of(bytes));
  }
  for (const size_t most : {2, 7, 100, 512}) {
    const std::vector<AddressPrefix> few = merged(many, most);
    EXPECT_LE(few.size(), most);
    for (const AddressPrefix& one : many) {
      EXPECT_TRUE(std::ranges::any_of(few, [&](const AddressPrefix& p) { return p.holds(one); })) << one.text();
    }
  }
}

}  // namespace
}  // namespace nvx::test
