// Properties that only links between processes show: deaths, silence, descriptors, memory, and versions of UCX.

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <future>
#include <thread>

#include "base/handle.h"
#include "net/ends.h"
#include "net/ucx/ucx_address.h"
#include "net/ucx/ucx_search.h"
#include "support/ranks.h"

namespace nvx::net::test {
namespace {

/// One end of a socket pair between a test and its child.
class Line {
 public:
  explicit Line(Fd fd) : fd_(std::move(fd)) {}
  void say(std::span<const std::byte> bytes) {
    ASSERT_EQ(::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }
  void say(uint64_t number) { say(std::as_bytes(std::span(&number, 1))); }
  std::vector<std::byte> hear() {
    std::vector<std::byte> bytes(1 << 16);
    const ssize_t got = recv(fd_.get(), bytes.data(), bytes.size(), 0);
    bytes.resize(got > 0 ? size_t(got) : 0);
    return bytes;
  }
  uint64_t hear_number() {
    uint64_t number = ~uint64_t(0);
    const std::vector<std::byte> bytes = hear();
    if (bytes.size() == sizeof number) std::memcpy(&number, bytes.data(), sizeof number);
    return number;
  }

 private:
  Fd fd_;
};

/// A process with its own link.
class Child {
 public:
  using Life = std::function<void(End& end, Line& line)>;

  explicit Child(const Life& life) : line(Fd()) {
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) throw system_error("socketpair failed");
    pid_ = fork();
    if (pid_ == 0) {
      ::close(fds[0]);
      Line mine{Fd(fds[1])};
      End end(open_ucx());
      mine.say(end.link->address());
      end.link->add(mine.hear());
      life(end, mine);
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
  PeerId meet(End& end) {
    const PeerId peer = end.link->add(line.hear());
    line.say(end.link->address());
    return peer;
  }

  Line line;

 private:
  pid_t pid_ = 0;
};

class Ucx : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
    if (const char* why = nvx::test::why_no_processes()) GTEST_SKIP() << why;
  }
};

/// Receives everything, until it is killed.
void live_on(End& end, Line&) {
  drive(
      {end.link.get()}, [] { return false; }, std::chrono::seconds(60));
}

bool drive(End& end, const std::function<bool()>& until, milliseconds patience = std::chrono::seconds(10)) {
  return test::drive({end.link.get()}, until, patience);
}

/// Without a name in the environment, the library that was found is tested.
TEST_F(Ucx, IsTheOneThatIsNamed) {
  const char* named = std::getenv("NVX_LIBUCP");
  if (!named) GTEST_SKIP() << "NVX_LIBUCP names none";
  ASSERT_EQ(look_at(named).size(), 1u) << named;
  EXPECT_EQ(look_at(loaded_ucx().at(0)).at(0).path, look_at(named)[0].path);
  EXPECT_NE(open_ucx()->describe().find(look_at(named)[0].version.text()), std::string::npos) << open_ucx()->describe();
}

TEST_F(Ucx, CarriesMessagesBetweenProcesses) {
  Child child([](End& end, Line& line) {
    EXPECT_TRUE(drive(end, [&] { return end.diary.messages.size() == 3; }));
    for (const Diary::Message& message : end.diary.messages) end.send(0, message.body.size(), 9);
    EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
    line.hear();
  });
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  for (const size_t bytes : {8, 100'000, 5'000'000}) end.send(peer, bytes, 1);
  EXPECT_TRUE(drive(end, [&] { return end.diary.messages.size() == 3 && end.all_done_once(); }));
  EXPECT_EQ(end.diary.failures, 0u);
  child.line.say(1);
  EXPECT_TRUE(drive(
      end, [&] { return end.diary.losses[peer] == 1; }, std::chrono::seconds(2)));
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_F(Ucx, LosesAPeerThatIsKilled) {
  Child child(live_on);
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  end.send(peer, 1000);
  ASSERT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  drive(
      end, [] { return false; }, milliseconds(50));
  child.send_signal(SIGSTOP);  // so that posts stay open
  for (int i = 0; i < 30; ++i) end.send(peer, i % 2 ? 4 << 20 : 200'000);
  end.link->progress();
  const auto began = Clock::now();
  child.send_signal(SIGKILL);
  ASSERT_TRUE(drive(end, [&] { return end.diary.losses[peer] == 1 && end.all_done_once(); }));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_GE(end.diary.failures, 1u);
  end.send(peer, 10);
  EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
}

TEST_F(Ucx, ADeathEndsASleep) {
  Child child(live_on);
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  end.send(peer, 1000);
  ASSERT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  drive(
      end, [] { return false; }, milliseconds(50));
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    child.send_signal(SIGKILL);
  });
  const auto began = Clock::now();
  while (end.diary.losses[peer] == 0 && Clock::now() - began < std::chrono::seconds(5)) {
    while (end.link->progress()) {
    }
    if (end.link->arm()) end.link->sleep(std::chrono::seconds(5));
  }
  killer.join();
  EXPECT_EQ(end.diary.losses[peer], 1);
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
}

TEST_F(Ucx, LosesAPeerThatIsKilledBeforeAnythingWasSentToIt) {
  Child child([](End& end, Line& line) {
    end.send(0, 10);
    EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
    line.say(1);
    live_on(end, line);
  });
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  ASSERT_TRUE(drive(end, [&] { return end.diary.messages.size() == 1; }));
  child.line.hear();
  drive(
      end, [] { return false; }, milliseconds(50));
  child.send_signal(SIGKILL);
  EXPECT_TRUE(drive(
      end, [&] { return end.diary.losses[peer] == 1; }, std::chrono::seconds(2)));
}

TEST_F(Ucx, CannotReachAProcessThatHasEnded) {
  Child child([](End&, Line&) {});
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  child.wait_for_end();
  end.send(peer, 10);
  end.send(peer, 10'000'000);
  ASSERT_TRUE(drive(end, [&] { return end.diary.losses[peer] == 1 && end.all_done_once(); }));
}

TEST_F(Ucx, GetsAPlaceBackFromASenderThatIsKilled) {
  Child child([](End& end, Line& line) {
    end.send(0, 256 << 20);
    live_on(end, line);
  });
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  ASSERT_TRUE(drive(end, [&] { return end.diary.places_asked == 1; }));
  child.send_signal(SIGKILL);
  EXPECT_TRUE(drive(end, [&] { return end.diary.losses[peer] == 1 && end.diary.drops == 1; }));
}

TEST_F(Ucx, GetsAPlaceBackFromASenderThatIsForgotten) {
  Child child([](End& end, Line& line) {
    end.send(0, 256 << 20);
    live_on(end, line);
  });
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  ASSERT_TRUE(drive(end, [&] { return end.diary.places_asked == 1; }));
  child.send_signal(SIGSTOP);
  drive(
      end, [] { return false; }, milliseconds(50));
  const auto began = Clock::now();
  end.link->forget(peer);
  EXPECT_TRUE(drive(
      end, [&] { return end.diary.drops == 1; }, std::chrono::seconds(3)));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
}

TEST_F(Ucx, ClosesInTimeThoughAPeerHangs) {
  Child child(live_on);
  auto end = std::make_unique<End>(open_ucx());
  const PeerId peer = child.meet(*end);
  end->send(peer, 1000);
  ASSERT_TRUE(drive(*end, [&] { return end->all_done_once(); }));
  child.send_signal(SIGSTOP);
  for (int i = 0; i < 60; ++i) end->send(peer, i % 2 ? 4 << 20 : 200'000);
  drive(
      *end, [] { return false; }, milliseconds(50));
  const auto began = Clock::now();
  end->link->close();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_TRUE(end->all_done_once());
}

/// Whether freed memory is reused; AddressSanitizer delays that.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMemoryIsReal = false;
#elif defined(__has_feature)
constexpr bool kMemoryIsReal = !__has_feature(address_sanitizer);
#else
constexpr bool kMemoryIsReal = true;
#endif

size_t open_descriptors() {
  size_t count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir)) ++count;
  closedir(dir);
  return count;
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * size_t(sysconf(_SC_PAGESIZE));
}

/// UCX closes its listener for good when a rank connects and no descriptor is free.
TEST_F(Ucx, NoFreeDescriptorForAConnectionIsSaid) {
  Child child([](End& end, Line& line) {
    const Fd lowest(dup(STDIN_FILENO));
    rlimit limit{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlim_t before = std::exchange(limit.rlim_cur, rlim_t(lowest.get()) + 1);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(end.link->why_unheard(0), "");
    line.say(1);
    EXPECT_TRUE(drive(end, [&] { return end.link->why_unheard(0).find("(ulimit -n)") != std::string::npos; }));
    limit.rlim_cur = before;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    line.say(2);
  });
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  EXPECT_EQ(child.line.hear_number(), 1u);
  end.send(peer, 100);
  auto said = std::async(std::launch::async, [&] { return child.line.hear_number(); });
  EXPECT_TRUE(drive(
      end, [&] { return said.wait_for(milliseconds(0)) == std::future_status::ready; }, std::chrono::seconds(20)));
  EXPECT_EQ(said.get(), 2u);
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_F(Ucx, ForgettingLeavesNothingBehind) {
  const auto count_them = [](End& end, Line& line) {
    // As many descriptors as at the beginning, after its peer has come and gone many times.
    EXPECT_TRUE(drive(end, [&] { return end.diary.messages.size() >= 20; }));
    const size_t before = open_descriptors();
    line.say(1);
    EXPECT_TRUE(drive(
        end, [&] { return end.diary.messages.size() == 1020; }, std::chrono::seconds(60)));
    EXPECT_TRUE(drive(end, [&] { return open_descriptors() <= before + 4; })) << open_descriptors() << " " << before;
    line.hear();
  };
  Child child(count_them);
  End end(open_ucx());
  const std::vector<std::byte> address = child.line.hear();
  child.line.say(end.link->address());
  const auto come_and_go = [&](uint32_t times) {
    for (uint32_t i = 0; i < times; ++i) {
      const PeerId peer = end.link->add(address);
      end.send(peer, 100);
      EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
      end.posts.clear();
      end.diary.dones.clear();
      end.link->forget(peer);
    }
  };
  come_and_go(20);
  child.line.hear();
  const auto settled = [&](size_t at_most) { return drive(end, [&] { return open_descriptors() <= at_most; }); };
  drive(
      end, [] { return false; }, milliseconds(500));
  const size_t before = open_descriptors(), resident = resident_bytes();
  come_and_go(1000);
  EXPECT_TRUE(settled(before + 4)) << open_descriptors() << " descriptors, there were " << before;
  const size_t grown = resident_bytes() - std::min(resident, resident_bytes());
  RecordProperty("bytes_per_turn", int(grown / 1000));
  if (kMemoryIsReal) {
    EXPECT_LT(grown / 1000, 4096u);
  }
  EXPECT_EQ(end.diary.failures, 0u);
  child.line.say(1);
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_F(Ucx, APeerCostsLittle) {
  constexpr size_t kPeers = 64;
  // The peers are links of one process; their cost there does not matter here.
  Child child([](End& first, Line& line) {
    std::deque<End> others;
    std::vector<Link*> links = {first.link.get()};
    for (size_t i = 1; i < kPeers; ++i) {
      links.push_back(others.emplace_back(open_ucx()).link.get());
      line.say(links.back()->address());
    }
    line.say(1);
    test::drive(
        links, [] { return false; }, std::chrono::seconds(60));
  });
  End end(open_ucx());
  std::vector<PeerId> peers = {child.meet(end)};
  while (peers.size() < kPeers) peers.push_back(end.link->add(child.line.hear()));
  child.line.hear();
  const auto reach = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) end.send(peers[i], 100);
    EXPECT_TRUE(drive(
        end, [&] { return end.all_done_once(); }, std::chrono::seconds(30)));
    drive(
        end, [] { return false; }, milliseconds(100));
  };
  reach(0, 8);
  const size_t descriptors = open_descriptors(), resident = resident_bytes();
  reach(8, kPeers);
  const double fds_each = double(open_descriptors() - descriptors) / (kPeers - 8);
  const double bytes_each = (double(resident_bytes()) - double(resident)) / (kPeers - 8);
  std::printf("a connected peer costs %.2f descriptors and %.0f bytes\n", fds_each, bytes_each);
  EXPECT_LE(fds_each, 2.0);
  if (kMemoryIsReal) {
    EXPECT_LE(bytes_each, 16384.0);
  }
}

TEST_F(Ucx, AForkedChildLeavesItsParentsLinkAlone) {
  Child child(live_on);
  End end(open_ucx());
  const PeerId peer = child.meet(end);
  end.send(peer, 1000);
  ASSERT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  const pid_t fork_of_us = fork();
  if (fork_of_us == 0) {
    end.send(peer, 10);
    const auto began = Clock::now();
    bool well = !end.link->arm() && end.link->progress() && end.all_done_once() && end.diary.failures == 1;
    end.link->wake();
    end.link->sleep(milliseconds(20));
    well = well && Clock::now() - began >= milliseconds(20);
    end.link->forget(peer);
    end.link->close();
    end.link.reset();
    _exit(well ? 0 : 1);
  }
  int status = -1;
  waitpid(fork_of_us, &status, 0);
  EXPECT_EQ(status, 0);
  for (int i = 0; i < 10; ++i) end.send(peer, 100'000);
  EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  EXPECT_EQ(end.diary.failures, 0u);
  EXPECT_TRUE(end.diary.losses.empty());
}

bool listens(int fd) {
  int value = 0;
  socklen_t bytes = sizeof value;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &bytes) == 0 && value != 0;
}

TEST_F(Ucx, AForkedChildOrANewProgramDoesNotListen) {
  constexpr int kMostFds = 1024;
  std::vector<int> before, made;
  for (int fd = 0; fd < kMostFds; ++fd) {
    if (listens(fd)) before.push_back(fd);
  }
  End end(open_ucx());
  for (int fd = 0; fd < kMostFds; ++fd) {
    if (listens(fd) && std::ranges::count(before, fd) == 0) made.push_back(fd);
  }
  ASSERT_FALSE(made.empty());
  for (const int fd : made) EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  const pid_t fork_of_us = fork();
  if (fork_of_us == 0) _exit(int(std::ranges::count_if(made, listens)));
  int status = -1;
  waitpid(fork_of_us, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::ranges::all_of(made, listens)) << "and the parent goes on";
}

TEST_F(Ucx, AForkedChildIsToldThatUcxDoesNotWorkInIt) {
  End end(open_ucx());
  const pid_t fork_of_us = fork();
  if (fork_of_us == 0) {
    try {
      open_ucx();
    } catch (const Error& error) {
      _exit(std::string(error.what()).find("forked") == std::string::npos);
    }
    _exit(1);
  }
  int status = -1;
  waitpid(fork_of_us, &status, 0);
  EXPECT_EQ(status, 0);
}

/// Sets an environment variable for its lifetime.
class Set {
 public:
  Set(const char* name, const char* value) : name_(name) { setenv(name, value, /*overwrite=*/1); }
  ~Set() { unsetenv(name_); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;

 private:
  const char* const name_;
};

TEST_F(Ucx, SaysThatSettingsLeaveNoWayToOtherHosts) {
  for (const auto& [variable, value] :
       {std::pair("NVX_UCX_TLS", "sm"), std::pair("NVX_UCX_TLS", "nonsense"), std::pair("UCX_TLS", "sm"),
        std::pair("UCX_NET_DEVICES", "nowhere"), std::pair("NVX_UCX_NET_DEVICES", "nowhere")}) {
    std::string what;
    try {
      const Set set(variable, value);
      open_ucx();
    } catch (const Error& error) {
      what = error.what();
    }
    EXPECT_NE(what.find(std::string("no transport to other hosts with ") + variable + "=" + value), what.npos) << what;
    EXPECT_NE(what.find("; this host has "), what.npos) << what;
  }
}

TEST_F(Ucx, WhatTheUserHasSetWins) {
  const auto described = [] { return open_ucx()->describe(); };
  const Set of_all("UCX_NET_DEVICES", "lo");
  EXPECT_NE(described().find("tcp on lo, host memory"), std::string::npos) << described();
  EXPECT_STREQ(std::getenv("UCX_NET_DEVICES"), "lo");
  const Set of_nvx("NVX_UCX_NET_DEVICES", "nowhere");
  EXPECT_THROW(described(), Error);
}

TEST_F(Ucx, RefusesAPeerWithAnotherUcx) {
  End end(open_ucx());
  const std::vector<std::byte> bytes = end.link->address();
  UcxAddress other = decode_address(bytes).value();
  const UcxVersion mine = other.version;
  other.version = mine < UcxVersion{1, 16, 0} ? UcxVersion{1, 20, 1} : UcxVersion{1, 15, 0};
  try {
    end.link->add(encode_address(other));
    FAIL() << "added";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(mine.text()), what.npos) << what;
    EXPECT_NE(what.find(other.version.text()), what.npos) << what;
    EXPECT_NE(what.find("NVX_LIBUCP"), what.npos) << what;
  }
}

}  // namespace
}  // namespace nvx::net::test
