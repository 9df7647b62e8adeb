#include "net/descriptors.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/error.h"
#include "base/handle.h"
#include "net/source_filter.h"

namespace nvx::net {
namespace {

/// UCX nests the epolls of its interfaces in its own epoll.
constexpr int kDeepest = 3;

/// The number after `word` in a line, in this base; -1 if there is none.
int64_t number_behind(const char* word, const char* line, int base) {
  int64_t number = -1;
  const char* at = std::strstr(line, word);
  if (!at) return number;
  for (at += std::strlen(word); *at == ' ';) ++at;
  (void)std::from_chars(at, at + std::strlen(at), number, base);
  return number;
}

/// Parses a descriptor's line of an epoll: "tfd:  17 events: 19 data: 11  pos:0 ino:2f1c sdev:8". The descriptor's
/// number may refer to another file by now, here or in another process that has the epoll. Newer kernels give the
/// inode, which identifies the file.
bool is_still_there(int fd, const char* line, struct stat* what) {
  if (fd < 0 || fstat(fd, what) != 0) return false;
  const int64_t inode = number_behind(" ino:", line, 16);
  return inode < 0 || uint64_t(inode) == uint64_t(what->st_ino);
}

/// Calls `act` for each socket that an epoll, or a nested epoll, watches.
void each_socket(int epoll, void (*act)(int socket), int depth) {
  char path[32] = "/proc/self/fdinfo/";
  (void)std::to_chars(path + std::strlen(path), std::end(path) - 1, epoll);
  const int info = open(path, O_RDONLY | O_CLOEXEC);
  if (info < 0) return;
  char line[256], some[512];
  size_t length = 0;
  for (ssize_t n; (n = read(info, some, sizeof some)) > 0;) {
    for (ssize_t i = 0; i < n; ++i) {
      if (some[i] != '\n') {
        if (length + 1 < sizeof line) line[length++] = some[i];
        continue;
      }
      line[std::exchange(length, 0)] = '\0';
      const auto fd = int(number_behind("tfd:", line, 10));
      struct stat what;
      if (fd == epoll || !is_still_there(fd, line, &what)) continue;
      if (S_ISSOCK(what.st_mode)) {
        act(fd);
      } else if (depth > 1) {
        each_socket(fd, act, depth - 1);
      }
    }
  }
  close(info);
}

}  // namespace

void grow_descriptor_table(size_t more) {
  const Fd lowest(eventfd(0, EFD_CLOEXEC));  // takes the lowest free number
  rlimit allowed{};
  if (!lowest || getrlimit(RLIMIT_NOFILE, &allowed) != 0) return;
  const auto wanted = std::min<rlim_t>(rlim_t(lowest.get()) + more, allowed.rlim_cur - 1);
  const Fd high(fcntl(lowest.get(), F_DUPFD_CLOEXEC, int(std::min<rlim_t>(wanted, 1 << 20))));
}

void limit_silence(int socket) {
  const int64_t liveness_s = std::chrono::ceil<std::chrono::seconds>(config().liveness).count();
  const int give_up_ms = 1000 * int(std::clamp<int64_t>(liveness_s + 10, 20, 1'000'000));
  int limit_ms = 0;
  socklen_t bytes = sizeof limit_ms;
  if (getsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit_ms, &bytes) == 0 && limit_ms == 0)
    (void)setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &give_up_ms, sizeof give_up_ms);
  constexpr int kRtoMaxMs = 44;  // TCP_RTO_MAX_MS, which older headers lack
  constexpr int64_t kLeast = 1000, kMost = 120'000;
  const int most = int(std::clamp<int64_t>(config().liveness.count() / 10, kLeast, kMost));
  (void)setsockopt(socket, IPPROTO_TCP, kRtoMaxMs, &most, sizeof most);
}

void claim_sockets(int epoll) {
  each_socket(
      epoll,
      [](int socket) {
        (void)fcntl(socket, F_SETFD, FD_CLOEXEC);
        limit_silence(socket);
        detach_source_filter(socket);
      },
      kDeepest);
}

void close_sockets(int epoll) {
  each_socket(
      epoll, [](int socket) { (void)close(socket); }, kDeepest);
}

void require_descriptors(size_t count, const std::string& what) {
  std::vector<Fd> opened(count);
  for (Fd& fd : opened) {
    fd = Fd(eventfd(0, EFD_CLOEXEC));
    if (!fd) throw system_error(what);
  }
}

std::string descriptor_limit_hint() {
  const Fd any(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (any || (errno != EMFILE && errno != ENFILE)) return "";
  return "; this process can open no more files, nor connections: raise the limit (ulimit -n)";
}

}  // namespace nvx::net
