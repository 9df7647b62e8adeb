#include "net/ucx_sockets.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/handle.h"

namespace nvx::net {
namespace {

/// UCX has an epoll of its interfaces' epolls.
constexpr int kDeepest = 3;

/// "/proc/self/fdinfo/17"
class InfoPath {
 public:
  explicit InfoPath(int fd) {
    char digits[12];
    size_t n = 0;
    do digits[n++] = char('0' + fd % 10);
    while ((fd /= 10) != 0);
    char* end = text_ + std::strlen(text_);
    while (n != 0) *end++ = digits[--n];
  }
  const char* text() const { return text_; }

 private:
  char text_[32] = "/proc/self/fdinfo/";
};

/// Calls act with each socket that an epoll, or an epoll in it, looks at: lines "tfd:  17 events: ..." say which.
void each_socket(int epoll, void (*act)(int socket), int depth) {
  const int info = open(InfoPath(epoll).text(), O_RDONLY | O_CLOEXEC);
  if (info < 0) return;
  constexpr char kTag[] = "tfd:";
  size_t matched = 0;  // of the tag, at the beginning of a line; behind it, blanks and digits
  int fd = -1;
  const auto found = [&] {
    struct stat what;
    if (fd < 0 || fd == epoll || fstat(fd, &what) != 0) return;
    if (S_ISSOCK(what.st_mode)) {
      act(fd);
    } else if (depth > 1) {
      each_socket(fd, act, depth - 1);
    }
  };
  char some[512];
  for (ssize_t n; (n = read(info, some, sizeof some)) > 0;) {
    for (ssize_t i = 0; i < n; ++i) {
      const char c = some[i];
      if (c == '\n') {
        matched = 0;
      } else if (matched < sizeof kTag - 1) {
        matched = c == kTag[matched] ? matched + 1 : sizeof kTag;
        fd = -1;
      } else if (matched == sizeof kTag - 1 && c >= '0' && c <= '9') {
        fd = (fd < 0 ? 0 : fd * 10) + (c - '0');
      } else if (matched == sizeof kTag - 1 && fd >= 0) {
        found();
        matched = sizeof kTag;  // nothing more of this line
      }
    }
  }
  close(info);
}

}  // namespace

void close_sockets_on_exec(int sleeps_on) {
  each_socket(
      sleeps_on, [](int socket) { (void)fcntl(socket, F_SETFD, FD_CLOEXEC); }, kDeepest);
}

void close_sockets(int sleeps_on) {
  each_socket(
      sleeps_on, [](int socket) { (void)close(socket); }, kDeepest);
}

std::string why_nothing_opens() {
  const Fd any(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (any || (errno != EMFILE && errno != ENFILE)) return "";
  return "; this process can open no more files, nor connections: raise the limit (ulimit -n)";
}

}  // namespace nvx::net
