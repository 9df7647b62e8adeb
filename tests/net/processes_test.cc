// Properties that only links between processes show: deaths, silence, forks, descriptors and memory.

#include <dirent.h>
#include <fcntl.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <thread>

#include "net/child.h"
#include "support/ranks.h"

namespace nvx::net::test {
namespace {

class Processes : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (GetParam() == std::string("ucx") && !why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
    if (const char* why = nvx::test::why_no_processes()) GTEST_SKIP() << why;
  }
  static std::unique_ptr<Link> open() { return open_link(GetParam()); }
  /// Starts a process with a link, and exchanges addresses with it.
  void begin(const Child::Body& body) {
    child.emplace(GetParam(), body);
    end.emplace(open());
    peer = child->exchange_addresses(*end);
  }
  /// The same, and connects both links.
  void connect() {
    begin(live_on);
    end->send(peer, 1000);
    ASSERT_TRUE(drive(*end, [&] { return end->all_done_once(); }));
    drive_for(milliseconds(50), {end->link.get()});
  }
  /// The same, and waits for the beginning of a message that takes a while.
  void begin_to_receive() {
    begin([](End& end, Line& line) {
      end.send(0, 64 << 20);
      live_on(end, line);
    });
    ASSERT_TRUE(drive(*end, [&] { return end->log.places_requested == 1; }));
  }

  std::optional<Child> child;
  std::optional<End> end;
  PeerId peer = 0;
};

INSTANTIATE_TEST_SUITE_P(Links, Processes, testing::Values("tcp", "ucx"),
                         [](const auto& info) { return std::string(info.param); });

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

TEST_P(Processes, CarriesMessagesBetweenProcesses) {
  begin([](End& end, Line& line) {
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() == 3; }));
    for (const EventLog::Message& message : end.log.messages) end.send(0, message.body.size(), 9);
    EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
    line.receive();
  });
  for (const size_t bytes : {8, 100'000, 5'000'000}) end->send(peer, bytes, 1);
  EXPECT_TRUE(drive(*end, [&] { return end->log.messages.size() == 3 && end->all_done_once(); }));
  EXPECT_EQ(end->log.failures, 0u);
  child->line.send(1);
  EXPECT_TRUE(drive(*end, std::chrono::seconds(2), [&] { return end->log.losses[peer] == 1; }));
  EXPECT_EQ(child->wait_for_end(), 0);
}

TEST_P(Processes, LosesAPeerThatIsKilled) {
  connect();
  child->send_signal(SIGSTOP);  // so that posts stay open
  for (int i = 0; i < 30; ++i) end->send(peer, i % 2 ? 4 << 20 : 200'000);
  end->link->progress();
  const auto began = Clock::now();
  child->send_signal(SIGKILL);
  ASSERT_TRUE(drive(*end, [&] { return end->log.losses[peer] == 1 && end->all_done_once(); }));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_GE(end->log.failures, 1u);
  end->send(peer, 10);
  EXPECT_TRUE(drive(*end, [&] { return end->all_done_once(); }));
}

TEST_P(Processes, ADeathEndsASleep) {
  connect();
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    child->send_signal(SIGKILL);
  });
  const auto began = Clock::now();
  while (end->log.losses[peer] == 0 && Clock::now() - began < std::chrono::seconds(5)) {
    while (end->link->progress()) {
    }
    if (end->log.losses[peer] == 0 && end->link->arm()) end->link->sleep(std::chrono::seconds(5));
  }
  killer.join();
  EXPECT_EQ(end->log.losses[peer], 1);
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
}

TEST_P(Processes, LosesAPeerThatIsKilledBeforeAnythingWasSentToIt) {
  begin([](End& end, Line& line) {
    end.send(0, 10);
    EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
    line.send(1);
    live_on(end, line);
  });
  ASSERT_TRUE(drive(*end, [&] { return end->log.messages.size() == 1; }));
  child->line.receive();
  drive_for(milliseconds(50), {end->link.get()});
  child->send_signal(SIGKILL);
  EXPECT_TRUE(drive(*end, std::chrono::seconds(2), [&] { return end->log.losses[peer] == 1; }));
}

TEST_P(Processes, CannotReachAProcessThatHasEnded) {
  begin([](End&, Line&) {});
  child->wait_for_end();
  end->send(peer, 10);
  end->send(peer, 10'000'000);
  ASSERT_TRUE(drive(*end, [&] { return end->log.losses[peer] == 1 && end->all_done_once(); }));
}

TEST_P(Processes, GetsAPlaceBackFromASenderThatIsKilled) {
  begin_to_receive();
  child->send_signal(SIGKILL);
  EXPECT_TRUE(drive(*end, [&] { return end->log.losses[peer] == 1 && end->log.drops == 1; }));
}

TEST_P(Processes, GetsAPlaceBackFromASenderThatIsForgotten) {
  begin_to_receive();
  child->send_signal(SIGSTOP);
  drive_for(milliseconds(50), {end->link.get()});
  const auto began = Clock::now();
  end->link->forget(peer);
  EXPECT_TRUE(drive(*end, std::chrono::seconds(3), [&] { return end->log.drops == 1; }));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
}

/// With a zero-copy send half in the socket, UCX would wait for that socket without sleeping, and crash when the peer
/// closes.
TEST_P(Processes, ForgettingAPeerThatStandsStillHarmsNothingWhenItContinues) {
  begin([](End& end, Line& line) {
    end.send(0, 8);
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() == 1 && end.all_done_once(); }));
    drive_for(milliseconds(50), {end.link.get()});
    line.send(1);
    raise(SIGSTOP);
    drive_for(milliseconds(600), {end.link.get()});
    end.link->forget(0);
    drive_for(milliseconds(200), {end.link.get()});
  });
  end->send(peer, 8);
  ASSERT_TRUE(drive(*end, [&] { return end->log.messages.size() == 1 && end->all_done_once(); }));
  child->line.receive();
  std::this_thread::sleep_for(milliseconds(50));
  for (int i = 0; i < 400; ++i) end->send(peer, 60 << 10);
  drive_for(milliseconds(300), {end->link.get()});
  EXPECT_FALSE(end->all_done_once()) << "the socket is full";
  end->link->forget(peer);
  drive_for(milliseconds(1200), {end->link.get()});
  child->send_signal(SIGCONT);
  int sleeps = 0;
  for (const auto stop = Clock::now() + milliseconds(1500); Clock::now() < stop;) {
    if (end->link->progress() || !end->link->arm()) continue;
    end->link->sleep(milliseconds(20));
    ++sleeps;
  }
  EXPECT_LT(sleeps, 1500) << "a sleep takes 20 ms";
  EXPECT_EQ(child->wait_for_end(), 0);
}

TEST_P(Processes, ClosesInTimeThoughAPeerHangs) {
  connect();
  child->send_signal(SIGSTOP);
  for (int i = 0; i < 60; ++i) end->send(peer, i % 2 ? 4 << 20 : 200'000);
  drive_for(milliseconds(50), {end->link.get()});
  const auto began = Clock::now();
  end->link->close();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  EXPECT_TRUE(end->all_done_once());
}

/// So only the posts of established connections need a connection to be closed.
TEST_P(Processes, APostToAPeerThatHasNotAcceptedTheConnectionCanBeCancelled) {
  Child child(GetParam(), [](End& end, Line&) {
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() == 2; }));
    for (const EventLog::Message& message : end.log.messages) EXPECT_EQ(message.body.size(), 100u);
  });
  End end(open());
  const PeerId peer = child.exchange_addresses(end);
  child.send_signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(50));
  end.send(peer, 100, 1);
  Post& cancelled = end.send(peer, end.link->segment_bytes(), 2);
  drive_for(milliseconds(100), {end.link.get()});
  EXPECT_EQ(end.log.ended, 0u);
  end.link->cancel(cancelled);
  EXPECT_TRUE(drive(end, [&] { return end.log.ended == 1; }));
  EXPECT_EQ(end.log.dones[&cancelled], 1);
  EXPECT_EQ(end.log.failures, 1u);
  child.send_signal(SIGCONT);
  end.send(peer, 100, 3);
  EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  EXPECT_EQ(end.log.failures, 1u);
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_P(Processes, ForgettingLeavesNothingBehind) {
  const auto count_them = [](End& end, Line& line) {
    // As many descriptors as at the beginning, after its peer has connected and left many times.
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() >= 20; }));
    const size_t before = open_descriptors();
    line.send(1);
    EXPECT_TRUE(drive(end, std::chrono::seconds(60), [&] { return end.log.messages.size() == 1020; }));
    EXPECT_TRUE(drive(end, [&] { return open_descriptors() <= before + 4; })) << open_descriptors() << " " << before;
    line.receive();
  };
  Child child(GetParam(), count_them);
  End end(open());
  const std::vector<std::byte> address = child.line.receive();
  child.line.send(end.link->address());
  const auto come_and_go = [&](uint32_t times) {
    for (uint32_t i = 0; i < times; ++i) {
      const PeerId peer = end.link->add(address);
      end.send(peer, 100);
      EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
      end.posts.clear();
      end.log.dones.clear();
      end.link->forget(peer);
    }
  };
  come_and_go(20);
  child.line.receive();
  const auto settled = [&](size_t at_most) { return drive(end, [&] { return open_descriptors() <= at_most; }); };
  drive_for(milliseconds(500), {end.link.get()});
  const size_t before = open_descriptors(), resident = resident_bytes();
  come_and_go(1000);
  EXPECT_TRUE(settled(before + 4)) << open_descriptors() << " descriptors, there were " << before;
  const size_t grown = resident_bytes() - std::min(resident, resident_bytes());
  RecordProperty("bytes_per_turn", int(grown / 1000));
  if (kMemoryIsReal) {
    EXPECT_LT(grown / 1000, 4096u);
  }
  EXPECT_EQ(end.log.failures, 0u);
  child.line.send(1);
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_P(Processes, APeerCostsLittle) {
  constexpr size_t kPeers = 64;
  // The peers are links of one process; their cost there does not matter here.
  begin([](End& first, Line& line) {
    std::deque<End> others;
    std::vector<Link*> links = {first.link.get()};
    for (size_t i = 1; i < kPeers; ++i) {
      links.push_back(others.emplace_back(open()).link.get());
      line.send(links.back()->address());
    }
    line.send(1);
    drive_for(std::chrono::seconds(60), links);
  });
  std::vector<PeerId> peers = {peer};
  while (peers.size() < kPeers) peers.push_back(end->link->add(child->line.receive()));
  child->line.receive();
  const auto reach = [&](size_t from, size_t to) {
    for (size_t i = from; i < to; ++i) end->send(peers[i], 100);
    EXPECT_TRUE(drive(*end, std::chrono::seconds(30), [&] { return end->all_done_once(); }));
    drive_for(milliseconds(100), {end->link.get()});
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

TEST_P(Processes, AForkedChildLeavesItsParentsLinkAlone) {
  connect();
  const pid_t fork_of_us = fork();
  if (fork_of_us == 0) {
    end->send(peer, 10);
    const auto began = Clock::now();
    bool well = !end->link->arm() && end->link->progress() && end->all_done_once() && end->log.failures == 1;
    end->link->wake();
    end->link->sleep(milliseconds(20));
    well = well && Clock::now() - began >= milliseconds(20);
    end->link->forget(peer);
    end->link->close();
    end->link.reset();
    _exit(well ? 0 : 1);
  }
  int status = -1;
  waitpid(fork_of_us, &status, 0);
  EXPECT_EQ(status, 0);
  for (int i = 0; i < 10; ++i) end->send(peer, 100'000);
  EXPECT_TRUE(drive(*end, [&] { return end->all_done_once(); }));
  EXPECT_EQ(end->log.failures, 0u);
  EXPECT_TRUE(end->log.losses.empty());
}

bool listens(int fd) {
  int value = 0;
  socklen_t bytes = sizeof value;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &bytes) == 0 && value != 0;
}

TEST_P(Processes, AForkedChildOrANewProgramDoesNotListen) {
  constexpr int kMostFds = 1024;
  std::vector<int> before, made;
  for (int fd = 0; fd < kMostFds; ++fd) {
    if (listens(fd)) before.push_back(fd);
  }
  End end(open());
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

}  // namespace
}  // namespace nvx::net::test
