#include "net/descriptors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace nvx::net {
namespace {

size_t table_size() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    size_t size = 0;
    if (word == "FDSize:" && status >> size) return size;
  }
  return 0;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return size_t(std::distance(begin(all), end(all)));
}

TEST(Descriptors, TheirLimitIsRaisedAtOnceAndNoneIsLeftOpen) {
  const size_t open = open_descriptors(), before = table_size();
  grow_descriptor_table(before);
  EXPECT_GT(table_size(), before);
  EXPECT_EQ(open_descriptors(), open);
}

TEST(Descriptors, NoMoreThanTheProcessMayHave) {
  rlimit allowed{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &allowed), 0);
  const size_t before = table_size();
  const rlimit few{2 * before, allowed.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const size_t open = open_descriptors();
  grow_descriptor_table(size_t(1) << 40);
  EXPECT_EQ(table_size(), 2 * before);
  EXPECT_EQ(open_descriptors(), open);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &allowed), 0);
}

}  // namespace
}  // namespace nvx::net
