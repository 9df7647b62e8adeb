#include "net/descriptors.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/error.h"
#include "base/handle.h"
#include "support/ranks.h"

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

TEST(Descriptors, WithoutRoomForThemNothingIsBegun) {
  if (test::is_sanitized()) GTEST_SKIP() << "UBSan checks objects through a pipe, for which there are no descriptors";
  const size_t open = open_descriptors();
  require_descriptors(8, "cannot begin");
  rlimit allowed{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &allowed), 0);
  const Fd lowest(dup(0));
  ASSERT_TRUE(lowest);
  const rlimit few{rlim_t(lowest.get()) + 5, allowed.rlim_max};  // room for four at most
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  try {
    require_descriptors(8, "cannot begin");
    ADD_FAILURE() << "eight descriptors, where four can be opened";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cannot begin: Too many open files"), std::string::npos) << error.what();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &allowed), 0);
  EXPECT_EQ(open_descriptors(), open + 1);
}

/// Linux 6.15 would otherwise compute it from the limit of the backoff.
TEST(Descriptors, ASilentConnectionIsGivenUpAfterNvxsLimitOrTheUsers) {
  for (const int set_before : {0, 5000}) {
    const Fd tcp(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(setsockopt(tcp.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &set_before, sizeof set_before), 0);
    limit_silence(tcp.get());
    int limit_ms = 0;
    socklen_t bytes = sizeof limit_ms;
    ASSERT_EQ(getsockopt(tcp.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &bytes), 0);
    EXPECT_EQ(limit_ms, set_before == 0 ? 20'000 : 5000);
  }
}

}  // namespace
}  // namespace nvx::net
