// Unix sockets whose backlogs are full of connections, by the same user and by another one who goes on: nothing blocks,
// ranks connect, and those that cannot end in time.

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <thread>

#include "base/error.h"
#include "memory/driver/gpu_info.h"
#include "memory/shm/host_relay.h"
#include "memory/shm/shm_registry.h"
#include "memory/shm/unix_socket.h"
#include "support/flood.h"
#include "support/gpu_processes.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::optional<Code> refusal_of(const std::string& name, milliseconds span) {
  try {
    (void)connect_or_throw(name, "it", Deadline::after(span));
    return std::nullopt;
  } catch (const Error& error) {
    return error.code();
  }
}

TEST(UnixSocket, AFullBacklogIsReportedAtOnceAndEmptiedInBoundedSteps) {
  const std::string name = unique_socket_name();
  const LocalSocket listener = listen_on(name);
  const auto began = Clock::now();
  fill_backlog(name);
  EXPECT_FALSE(connect_to(name));
  EXPECT_TRUE(backlog_is_full());
  EXPECT_EQ(refusal_of(name, milliseconds(50)), Code::kTimeout);
  EXPECT_LT(Clock::now() - began, seconds(20));
  int taken = 0;
  accept_clients(listener, [&](const LocalSocket&) { ++taken; });
  EXPECT_EQ(taken, kAcceptedAtOnce) << "and no more, however many there are";
  EXPECT_TRUE(connect_to(name));
  EXPECT_EQ(refusal_of(unique_socket_name(), seconds(20)), Code::kPeerDied) << "nobody listens";
}

TEST(UnixSocket, AUserThatTheNamespaceDoesNotMapIsRefused) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string name = unique_socket_name();
  const LocalSocket listener = listen_on(name);
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWUSER) != 0) _exit(1);
    try {
      (void)listen_on(unique_socket_name());
      _exit(2);
    } catch (const Error& error) {
      if (std::string(error.what()).find("uid 65534, that of this process, is also the number of all users") ==
          std::string::npos)
        _exit(3);
    }
    // A process of that number on the other side: the same user and any other one look alike.
    _exit(connect_to(name) || errno != EPERM ? 4 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (status == 1 << 8) GTEST_SKIP() << "this user cannot make a user namespace";
  EXPECT_EQ(status, 0);
}

/// As in a container whose namespace maps some users, and that one among them.
TEST(UnixSocket, TheNumberOfAllUnmappedUsersIsRefusedWhereSomeAreUnmapped) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const pid_t child = fork();
  if (child == 0) {
    const uid_t outside = geteuid();
    if (unshare(CLONE_NEWUSER) != 0) _exit(1);
    std::ofstream("/proc/self/uid_map") << "65534 " << outside << " 1\n";
    if (geteuid() != 65534) _exit(1);
    try {
      (void)listen_on(unique_socket_name());
      _exit(2);
    } catch (const Error& error) {
      _exit(error.failure().advice.find("/proc/self/uid_map") == std::string::npos ? 3 : 0);
    }
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (status == 1 << 8) GTEST_SKIP() << "this user cannot make a user namespace";
  EXPECT_EQ(status, 0);
}

/// All users of the host can read a socket's name, but not its tokens.
std::string without_tokens(const std::string& name) { return name.substr(0, name.find('.')); }

TEST(UnixSocket, PacketsWithoutTheTokenAreDropped) {
  const std::string name = unique_socket_name();
  EXPECT_LE(name.size(), 47u) << "messages have no more room";
  EXPECT_EQ(name.size() - without_tokens(name).size(), 1 + 2 * sizeof(Token));
  for (const bool real_listener : {true, false}) {
    const LocalSocket listener = listen_on(real_listener ? name : without_tokens(name));
    const LocalSocket client = connect_to(real_listener ? without_tokens(name) : name);
    std::vector<LocalSocket> host;
    accept_clients(listener, [&](LocalSocket accepted) { host.push_back(std::move(accepted)); });
    ASSERT_EQ(host.size(), 1u);
    const LocalSocket& without_token = real_listener ? client : host[0];
    const LocalSocket& other = real_listener ? host[0] : client;
    uint64_t word = 7;
    ASSERT_TRUE(send_packet(without_token, &word, sizeof word, {}));
    EXPECT_FALSE(receive_packet(other, &word, sizeof word, {}));
    EXPECT_EQ(errno, EPROTO);
  }
  const LocalSocket listener = listen_on(name), client = connect_to(name);
  accept_clients(listener, [&](const LocalSocket& host) {
    const int fds[] = {STDIN_FILENO};
    ASSERT_TRUE(send_packet(client, "abc", 3, fds));
    char text[3];
    Fd fd;
    EXPECT_TRUE(receive_packet(host, text, sizeof text, {&fd, 1})) << "its packets are those of the right tokens";
    EXPECT_TRUE(fd);
    ASSERT_TRUE(send_packet({Fd(dup(client.get())), client.peer_token, client.own_token}, "abc", 3, {}));
    EXPECT_FALSE(receive_packet(host, text, sizeof text, {})) << "nobody gets in with the token that it has received";
  });
}

/// A process of the same user, in another container for example, that reads names in /proc/net/unix.
TEST(UnixSocket, AClientWithoutTokensGetsNothingOfAnIpcSocketOrARelay) {
  const auto here = ShmRegistry::instance();
  IpcSocket ipc(*here);
  HostRelay relay(nvx::PeerInfo::of(0, "rank 0"));
  ipc.serve_with(&relay);
  relay.publish(std::vector<uint8_t>{1, 2, 3});
  const auto info = nvx::PeerInfo::of(1, "rank 1");
  std::vector<LocalSocket> clients;
  for (const std::string& name : {ipc.name(), relay.name()}) {
    clients.push_back(connect_to(without_tokens(name)));  // sends nothing
    clients.push_back(connect_to(without_tokens(name)));
    ASSERT_TRUE(send_packet(clients.back(), &info, name == ipc.name() ? 0 : sizeof info, {}));
  }
  for (int i = 0; i < 3; ++i) ipc.serve(milliseconds(1));
  EXPECT_TRUE(relay.peers().empty());
  for (size_t i = 0; i < clients.size(); ++i) {
    char byte = 0;
    const ssize_t got = recv(clients[i].get(), &byte, sizeof byte, MSG_DONTWAIT);
    EXPECT_LE(got, 0) << i;
    EXPECT_TRUE(i % 2 == 0 || got == 0) << i << " sent something wrong, so its connection is closed";
  }
}

/// Each would hold a descriptor of this process, until there are none for ranks.
TEST(UnixSocket, OfClientsThatSendNothingTheOldestAreClosed) {
  constexpr size_t kSilent = kMostSilent + 64;
  const auto here = ShmRegistry::instance();
  IpcSocket ipc(*here);
  HostRelay relay(nvx::PeerInfo::of(0, "rank 0"));
  ipc.serve_with(&relay);
  for (const std::string& name : {ipc.name(), relay.name()}) {
    std::vector<LocalSocket> silent;
    for (size_t i = 0; i < kSilent; ++i) silent.push_back(connect_to(without_tokens(name)));
    for (int i = 0; i < 3; ++i) ipc.serve(milliseconds(1));
    const auto is_closed = [](const LocalSocket& other) {
      char byte = 0;
      return recv(other.get(), &byte, sizeof byte, MSG_DONTWAIT) == 0;
    };
    EXPECT_EQ(size_t(std::ranges::count_if(silent, is_closed)), kSilent - kMostSilent);
    EXPECT_TRUE(is_closed(silent.front()));
    EXPECT_FALSE(is_closed(silent.back()));
  }
}

TEST(UnixSocket, NeitherSendsNorReceivesBlock) {
  const std::string name = unique_socket_name();
  const LocalSocket listener = listen_on(name);
  const LocalSocket one = connect_to(name);
  LocalSocket other;
  accept_clients(listener, [&](LocalSocket client) { other = std::move(client); });
  ASSERT_TRUE(one && other);
  uint64_t word = 7;
  EXPECT_FALSE(receive_packet(other, &word, sizeof word, {}));
  EXPECT_EQ(errno, EAGAIN);
  int sent = 0;
  while (sent < 1'000'000 && send_packet(one, &word, sizeof word, {})) ++sent;
  EXPECT_EQ(errno, EAGAIN) << "after " << sent;
  for (int i = 0; i < sent; ++i) ASSERT_TRUE(receive_packet(other, &word, sizeof word, {}));
}

// --- more descriptors in flight than the limit of open files

/// A user's processes may have as many descriptors in flight as one may have open. Beyond that, Linux passes none.
class InFlight {
 public:
  static constexpr rlim_t kMost = 64;
  /// Becomes a user whom that limit applies to, not that of another test: for a process of the test's own.
  InFlight() {
    const uid_t user = 1000 + uid_t(getpid()) % 60'000;
    EXPECT_EQ(setgid(user), 0);
    EXPECT_EQ(setuid(user), 0);
    rlimit few{kMost, kMost};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  /// Sends more than that, and nobody receives them.
  void fill() {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    const LocalSocket full{Fd(pair[0])};
    end_ = Fd(pair[1]);
    const int stdin_twice[] = {0, 0};
    while (send_packet(full, "", 1, stdin_twice)) continue;
    EXPECT_EQ(errno, EAGAIN);
  }
  void empty() { end_ = Fd(); }

 private:
  Fd end_;
};

/// Runs the body as a process of such a user.
void beside_descriptors_in_flight(const std::function<void(InFlight&)>& body) {
  all_end_well(1, [&](int) {
    InFlight others;
    others.fill();
    body(others);
  });
}

TEST(InFlight, DescriptorsWaitUntilOthersAreReceived) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  beside_descriptors_in_flight([](InFlight& others) {
    const std::string name = unique_socket_name();
    const LocalSocket listener = listen_on(name), client = connect_to(name);
    const int fds[] = {STDIN_FILENO};
    EXPECT_FALSE(send_packet(client, "abc", 3, fds));
    EXPECT_EQ(errno, EAGAIN);
    EXPECT_TRUE(send_packet(client, "abc", 3, {})) << "without a descriptor";
    try {
      (void)send_before(client, "abc", 3, fds, Deadline::after(milliseconds(50)));
      ADD_FAILURE() << "there is no room";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("more descriptors in flight than its limit of open files (ulimit -n)"),
                std::string::npos)
          << error.what();
    }
    others.empty();
    EXPECT_TRUE(send_before(client, "abc", 3, fds, Deadline::after(seconds(20))));
  });
}

TEST(InFlight, AnIpcSocketAnswersOnceThereIsRoom) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  beside_descriptors_in_flight([](InFlight& others) {
    const auto here = ShmRegistry::instance();
    IpcSocket mine(*here);
    const std::vector<IpcSocket::Wanted> own{{here->arena().id(), mine.name(), getpid()}};
    try {
      (void)mine.fetch(own, Deadline::after(milliseconds(100)));
      ADD_FAILURE() << "there is no room";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kTimeout);
      EXPECT_NE(std::string(error.what()).find("(ulimit -n)"), std::string::npos) << error.what();
    }
    int calls = 0;
    const auto check = [&] { ++calls == 20 ? others.empty() : void(); };
    EXPECT_EQ(mine.fetch(own, Deadline::after(seconds(20)), check).size(), 1u);
    EXPECT_GE(calls, 20);
  });
}

TEST(InFlight, ARelayAndItsClientWaitForRoom) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  beside_descriptors_in_flight([](InFlight& others) {
    HostRelay relay(nvx::PeerInfo::of(0, "rank 0"));
    relay.publish(std::vector<uint8_t>{5});
    RelayClient client(relay.name(), nvx::PeerInfo::of(1, "rank 1"));
    std::optional<std::vector<uint8_t>> got;
    const auto go_on = [&](int rounds) {
      for (int i = 0; i < rounds && !got; ++i) relay.serve(), got = client.next(milliseconds(5));
    };
    go_on(10);
    EXPECT_FALSE(got);
    EXPECT_TRUE(client.open());
    EXPECT_FALSE(relay.has_lost_clients());
    others.empty();
    go_on(1000);
    EXPECT_EQ(got, std::vector<uint8_t>{5});
  });
}

// --- readers that do not read

TEST(HostRelay, AReaderThatReadsNothingBlocksNoOtherAndGetsItAllLater) {
  int queued = 10;
  std::ifstream("/proc/sys/net/unix/max_dgram_qlen") >> queued;
  const int records = std::min(queued + 20, 2000);
  HostRelay relay(nvx::PeerInfo::of(0, "rank 0"));
  RelayClient slow(relay.name(), nvx::PeerInfo::of(1, "rank 1")), quick(relay.name(), nvx::PeerInfo::of(2, "rank 2"));
  for (int i = 0; i < records; ++i) {
    relay.publish(std::vector<uint8_t>{uint8_t(i)});
    ASSERT_EQ(quick.next(seconds(20)), std::vector<uint8_t>{uint8_t(i)});
  }
  for (int i = 0; i < records; ++i) {
    relay.serve();
    ASSERT_EQ(slow.next(seconds(20)), std::vector<uint8_t>{uint8_t(i)});
  }
}

TEST(HostRelay, IsReachedOnceItsBacklogHasRoom) {
  HostRelay relay(nvx::PeerInfo::of(0, "rank 0"));
  fill_backlog(relay.name());
  RelayClient client(relay.name(), nvx::PeerInfo::of(1, "rank 1"));
  EXPECT_TRUE(client.open());
  EXPECT_FALSE(client.next(milliseconds(20)));
  EXPECT_TRUE(client.open());
  std::atomic<bool> got{false};
  std::thread serving([&] {  // a relay belongs to one thread
    relay.publish(std::vector<uint8_t>{5});
    while (!got) relay.serve();
  });
  EXPECT_EQ(client.next(seconds(20)), std::vector<uint8_t>{5});
  got = true;
  serving.join();
}

TEST(PoolServer, AFullBacklogIsNotWaitedForLong) {
  const std::string name = unique_socket_name();
  const LocalSocket nobody = listen_on(name);
  fill_backlog(name);
  Fd fd;
  try {
    (void)request_from_pool(name, {}, &fd, Deadline::after(milliseconds(50)));
    ADD_FAILURE() << "nobody answers there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_NE(std::string(error.what()).find("backlog of its Unix socket was full for 50 ms"), std::string::npos)
        << error.what();
  }
}

// --- another user ---------------------------------------------------------------------------------------------------

struct SocketInfo {
  ArenaId arena;
  char socket[48] = {};
  pid_t pid = 0;
};

/// A rank's IPC socket, and what the others need to connect to it.
SocketInfo info_of(const std::shared_ptr<ShmRegistry>& here, const IpcSocket& ipc) {
  SocketInfo info{here->arena().id(), {}, getpid()};
  put(info.socket, ipc.name());
  return info;
}

TEST(Flood, OfEachIpcSocketDoesNotKeepRanksApart) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  constexpr int kRanks = 3;
  const SharedTable table(kRanks);
  all_end_well(kRanks, [&](int rank) {
    const auto here = ShmRegistry::instance();
    const Span span = here->arena().allocate(4096);
    IpcSocket ipc(*here);
    const Flood flood({getpid()});
    flood.await(1);
    SharedBootstrap bootstrap(table, rank);
    const auto infos = read_infos<SocketInfo>(bootstrap.all_gather(bytes_of(info_of(here, ipc))), 1, of_rank);
    if (rank == kRanks - 1) std::this_thread::sleep_for(milliseconds(500));  // the other ranks wait for it meanwhile
    std::vector<IpcSocket::Wanted> wanted;
    for (int r = 0; r < kRanks; ++r) {
      if (r != rank) wanted.push_back({infos[size_t(r)].arena, infos[size_t(r)].socket, infos[size_t(r)].pid});
    }
    const auto began = Clock::now();
    const auto fetched = ipc.fetch(wanted, Deadline::after(seconds(30)));
    std::printf("rank %d fetched the other arenas after %lld ms\n", rank,
                (long long)std::chrono::duration_cast<milliseconds>(Clock::now() - began).count());
    for (const auto& [id, process] : fetched) *process->at(span.offset + size_t(rank)) = std::byte(1);
    const auto all_have_written = [&] {
      for (int r = 0; r < kRanks; ++r) {
        if (r != rank && *here->arena().at(span.offset + size_t(r)) != std::byte(1)) return false;
      }
      return true;
    };
    const Deadline deadline = Deadline::after(seconds(30));
    while (!all_have_written() && !deadline.passed(Clock::now())) ipc.serve(milliseconds(1));
    EXPECT_TRUE(all_have_written());
  });
}

TEST(Flood, OfARankThatDoesNotAnswerEndsInTimeAndIsReported) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  const auto here = ShmRegistry::instance();
  IpcSocket mine(*here), silent(*here);
  const Flood flood({getpid()});
  flood.await(2);
  const auto began = Clock::now();
  try {
    (void)mine.fetch({{ArenaId{1, 2}, silent.name(), getpid()}}, Deadline::after(milliseconds(500)));
    ADD_FAILURE() << "nobody answers there";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_NE(text.find("the backlog of its Unix socket is full, and other users, such as 65534, have made "),
              std::string::npos)
        << text;
    EXPECT_NE(error.failure().advice.find("whether another user of this host floods"), std::string::npos)
        << error.failure().advice;
  }
  EXPECT_LT(Clock::now() - began, seconds(5));
}

TEST(Flood, OfAPoolServerBlocksNoRank) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  Process mine(1), theirs(1);
  (void)theirs.registry->pool(0).allocate(2 * M);
  const Flood flood({getpid()});
  std::this_thread::sleep_for(milliseconds(200));  // its thread may keep up, so that it is never full
  for (int i = 0; i < 20; ++i) {
    const auto seen = mine.registry->peer_pool(0, {theirs.registry->id(), 0, theirs.registry->pool_socket()});
    seen->map_up_to(2 * M, Deadline::after(seconds(30)));
    EXPECT_EQ(seen->mapped(), 2 * M);
  }
}

TEST(Flood, OfTheServersOfPeerMappingsDoesNotKeepRanksApart) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  const SharedTable table(3);
  all_end_well(3, [&](int rank) {
    const Flood flood({getpid()});
    SharedBootstrap bootstrap(table, rank);
    Process process(3);
    process.driver->lacks(ShareKind::kFabric);
    for (int i = 0; i < 3; ++i) {
      MappingOptions options = options_of(rank, 3, rank);
      options.timeout = seconds(20);
      const PeerMappings mappings(*process.registry, bootstrap, options);
      EXPECT_EQ(mappings.agreement().kind, ShareKind::kFd) << mappings.agreement().why_not_better;
      EXPECT_EQ(mappings.fallbacks(), "");
      write_and_look(mappings, bootstrap, rank, 3);
      (void)bootstrap.all_gather({});
    }
  });
}

}  // namespace
}  // namespace nvx::test
