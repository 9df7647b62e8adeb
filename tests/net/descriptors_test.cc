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

#include "base/handle.h"

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

TEST(Descriptors, ConnectionsToAPortAreLimitedToo) {
  const Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)),
      client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  ASSERT_EQ(connect(client.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
  const auto limit = [&] {
    int limit_ms = 0;
    socklen_t size = sizeof limit_ms;
    EXPECT_EQ(getsockopt(client.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &size), 0);
    return limit_ms;
  };
  limit_silence_of(uint16_t(ntohs(address.sin_port) + 1));
  EXPECT_EQ(limit(), 0);
  limit_silence_of(ntohs(address.sin_port));
  EXPECT_EQ(limit(), 20'000);
}

}  // namespace
}  // namespace nvx::net
