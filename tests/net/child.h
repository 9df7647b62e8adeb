#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/handle.h"
#include "net/ends.h"

/// Links in processes of their own.
namespace nvx::net::test {

/// One end of a socket pair between a test and its child.
class Line {
 public:
  explicit Line(Fd fd) : fd_(std::move(fd)) {}
  void send(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  void send(uint64_t number) { send(std::as_bytes(std::span(&number, 1))); }
  std::vector<std::byte> receive() {
    std::vector<std::byte> bytes(1 << 16);
    const ssize_t got = recv(fd_.get(), bytes.data(), bytes.size(), 0);
    bytes.resize(got > 0 ? size_t(got) : 0);
    return bytes;
  }
  uint64_t receive_number() {
    uint64_t number = ~uint64_t(0);
    const std::vector<std::byte> bytes = receive();
    if (bytes.size() == sizeof number) std::memcpy(&number, bytes.data(), sizeof number);
    return number;
  }

 private:
  Fd fd_;
};

/// A process with its own link.
class Child {
 public:
  using Body = std::function<void(End& end, Line& line)>;

  Child(const std::string& link, const Body& body) : line(Fd()) {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) throw system_error("socketpair failed");
    pid_ = fork();
    if (pid_ == 0) {
      ::close(fds[0]);
      Line mine{Fd(fds[1])};
      End end(open_link(link));
      mine.send(end.link->address());
      end.link->add(mine.receive());
      body(end, mine);
      end.link->close();
      _exit(testing::Test::HasFailure());
    }
    ::close(fds[1]);
    line = Line(Fd(fds[0]));
  }
  ~Child() {
    if (pid_ <= 0) return;
    send_signal(SIGCONT);
    send_signal(SIGKILL);
    wait_for_end();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void send_signal(int signal) const { ::kill(pid_, signal); }
  int wait_for_end() {
    int status = 0;
    waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }
  /// Exchanges addresses with this end.
  PeerId exchange_addresses(End& end) {
    const PeerId peer = end.link->add(line.receive());
    line.send(end.link->address());
    return peer;
  }

  Line line;

 private:
  pid_t pid_ = 0;
};

/// Receives everything, until it is killed.
inline void live_on(End& end, Line&) { drive_for(std::chrono::seconds(60), {end.link.get()}); }

inline bool drive(End& end, milliseconds timeout, const std::function<bool()>& until) {
  return test::drive({end.link.get()}, timeout, until);
}
inline bool drive(End& end, const std::function<bool()>& until) { return test::drive({end.link.get()}, until); }

}  // namespace nvx::net::test
