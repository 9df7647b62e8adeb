#include "support/flood.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>

#include "memory/shm/unix_socket.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

std::vector<std::string> sockets_of(const std::vector<pid_t>& pids) {
  std::vector<std::string> names;
  std::ifstream table("/proc/net/unix");
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::string number, references, protocol, flags, type, state, inode, name;
    fields >> number >> references >> protocol >> flags >> type >> state >> inode >> name;
    if (flags != "00010000") continue;  // nobody listens there
    for (const pid_t pid : pids) {
      if (name.starts_with("@nvx-" + std::to_string(pid) + "-")) names.push_back(name.substr(1));
    }
  }
  return names;
}

/// Whether it is full, and not gone.
bool fill(const std::string& name) {
  constexpr int kMost = 100'000;
  for (int i = 0; i < kMost; ++i) {
    errno = 0;
    if (!connect_to(name) && errno != EPERM) return backlog_is_full();  // EPERM: it is connected, to another user
  }
  return false;
}

[[noreturn]] void flood(const std::vector<pid_t>& victims, int reports) {
  if (setgroups(0, nullptr) != 0 || setgid(Flood::kUser) != 0 || setuid(Flood::kUser) != 0) _exit(1);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::set<std::string> full;
  for (;;) {
    for (const std::string& name : sockets_of(victims)) {
      if (fill(name) && full.insert(name).second) (void)!write(reports, "x", 1);
    }
  }
}

}  // namespace

const char* Flood::why_not() {
  if (geteuid() != 0) return "only root can act as another user";
  return why_no_processes();
}

Flood::Flood(std::vector<pid_t> victims) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  child_ = fork();
  if (child_ == 0) flood(victims, ends[1]);
  close(ends[1]);
  reports_ = ends[0];
}

Flood::~Flood() {
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
  close(reports_);
}

void Flood::await(size_t sockets) const {
  char byte = 0;
  for (size_t i = 0; i < sockets; ++i) ASSERT_EQ(read(reports_, &byte, 1), 1) << "user " << kUser << " cannot flood";
}

void fill_backlog(const std::string& name) { EXPECT_TRUE(fill(name)); }

}  // namespace nvx::test
