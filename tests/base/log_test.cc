// Log lines, where stderr takes none.

#include "base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <string>

#include "base/handle.h"

namespace nvx {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

/// Makes stderr a pipe, for as long as it lives.
class PipedStderr {
 public:
  PipedStderr() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    from_ = Fd(ends[0]);
    EXPECT_GE(fcntl(from_.get(), F_SETFL, O_NONBLOCK), 0);
    EXPECT_EQ(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    close(ends[1]);
  }
  ~PipedStderr() { dup2(before_.get(), STDERR_FILENO); }

  void fill() {
    fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
    while (::write(STDERR_FILENO, "x", 1) == 1) continue;
    fcntl(STDERR_FILENO, F_SETFL, 0);
  }
  std::string drain() {
    std::string all;
    char some[4096];
    for (ssize_t n; (n = ::read(from_.get(), some, sizeof some)) > 0;) all.append(some, size_t(n));
    return all;
  }

 private:
  Fd before_{fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)}, from_;
};

TEST(LogLine, DoesNotWaitForAReaderThatHasStopped) {
  PipedStderr piped;
  log_line("read");
  EXPECT_NE(piped.drain().find("] read\n"), std::string::npos);
  piped.fill();
  const auto began = steady_clock::now();
  auto logged = std::async(std::launch::async, [] {
    for (int i = 0; i < 100; ++i) log_line("not read");
  });
  const bool over = logged.wait_for(seconds(30)) == std::future_status::ready;
  const auto took = steady_clock::now() - began;
  EXPECT_EQ(piped.drain().find("not read"), std::string::npos);
  while (logged.wait_for(seconds(0)) != std::future_status::ready) (void)piped.drain();
  EXPECT_TRUE(over);
  EXPECT_LT(took, seconds(2)) << "only the first line waits";
  log_line("read again");
  EXPECT_NE(piped.drain().find("] read again\n"), std::string::npos);
}

}  // namespace
}  // namespace nvx
