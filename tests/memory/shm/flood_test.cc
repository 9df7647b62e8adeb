// Unix sockets whose backlogs are full of connections, by the same user and by another one who goes on: nothing blocks,
// ranks meet, and those who cannot end in time.

#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "memory/driver/cards.h"
#include "memory/shm/handout.h"
#include "memory/shm/neighbours.h"
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

TEST(UnixSocket, AFullBacklogIsSaidAtOnceAndEmptiedInBoundedSteps) {
  const std::string name = fresh_socket_name();
  const LocalSocket listener = listen_on(name);
  const auto began = Clock::now();
  fill_backlog(name);
  EXPECT_FALSE(connect_to(name));
  EXPECT_TRUE(backlog_is_full());
  EXPECT_EQ(refusal_of(name, milliseconds(50)), Code::kTimeout);
  EXPECT_LT(Clock::now() - began, seconds(20));
  int taken = 0;
  accept_guests(listener, [&](const LocalSocket&) { ++taken; });
  EXPECT_EQ(taken, kAcceptedAtOnce) << "and no more, however many there are";
  EXPECT_TRUE(connect_to(name));
  EXPECT_EQ(refusal_of(fresh_socket_name(), seconds(20)), Code::kPeerDied) << "nobody listens";
}

TEST(UnixSocket, AUserThatTheNamespaceDoesNotMapIsRefused) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const std::string name = fresh_socket_name();
  const LocalSocket listener = listen_on(name);
  const pid_t child = fork();
  if (child == 0) {
    if (unshare(CLONE_NEWUSER) != 0) _exit(1);
    try {
      (void)listen_on(fresh_socket_name());
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
      (void)listen_on(fresh_socket_name());
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

/// Everybody on the host can read a socket's name, but not its words.
std::string without_words(const std::string& name) { return name.substr(0, name.find('.')); }

TEST(UnixSocket, AnEndThatDoesNotKnowTheWordsIsNotHeard) {
  const std::string name = fresh_socket_name();
  EXPECT_LE(name.size(), 47u) << "messages have no more room";
  EXPECT_EQ(name.size() - without_words(name).size(), 1 + 2 * sizeof(Word));
  for (const bool real_listener : {true, false}) {
    const LocalSocket listener = listen_on(real_listener ? name : without_words(name));
    const LocalSocket guest = connect_to(real_listener ? without_words(name) : name);
    std::vector<LocalSocket> host;
    accept_guests(listener, [&](LocalSocket accepted) { host.push_back(std::move(accepted)); });
    ASSERT_EQ(host.size(), 1u);
    const LocalSocket& stranger = real_listener ? guest : host[0];
    const LocalSocket& other = real_listener ? host[0] : guest;
    uint64_t word = 7;
    ASSERT_TRUE(send_packet(stranger, &word, sizeof word, {}));
    EXPECT_FALSE(receive_packet(other, &word, sizeof word, {}));
    EXPECT_EQ(errno, EPROTO);
  }
  const LocalSocket listener = listen_on(name), guest = connect_to(name);
  accept_guests(listener, [&](const LocalSocket& host) {
    const int fds[] = {STDIN_FILENO};
    ASSERT_TRUE(send_packet(guest, "abc", 3, fds));
    char text[3];
    Fd fd;
    EXPECT_TRUE(receive_packet(host, text, sizeof text, {&fd, 1})) << "its packets are those of the right words";
    EXPECT_TRUE(fd);
    ASSERT_TRUE(send_packet({Fd(dup(guest.get())), guest.hears, guest.says}, "abc", 3, {}));
    EXPECT_FALSE(receive_packet(host, text, sizeof text, {})) << "nobody repeats what it has been told";
  });
}

/// A process of the same user, in another container for example, that reads names in /proc/net/unix.
TEST(UnixSocket, AStrangerOfTheSameUserGetsNothingOfADoorOrAHandout) {
  const auto here = Neighbours::here();
  Doorway door(*here);
  Handout handout(nvx::Card::of(0, "rank 0"));
  door.hand_out(&handout);
  handout.give(std::vector<uint8_t>{1, 2, 3});
  const auto card = nvx::Card::of(1, "rank 1");
  std::vector<LocalSocket> strangers;
  for (const std::string& name : {door.name(), handout.name()}) {
    strangers.push_back(connect_to(without_words(name)));  // says nothing
    strangers.push_back(connect_to(without_words(name)));
    ASSERT_TRUE(send_packet(strangers.back(), &card, name == door.name() ? 0 : sizeof card, {}));
  }
  for (int i = 0; i < 3; ++i) door.serve(milliseconds(1));
  EXPECT_TRUE(handout.guests().empty());
  for (size_t i = 0; i < strangers.size(); ++i) {
    char byte = 0;
    const ssize_t got = recv(strangers[i].get(), &byte, sizeof byte, MSG_DONTWAIT);
    EXPECT_LE(got, 0) << i;
    EXPECT_TRUE(i % 2 == 0 || got == 0) << i << " said something wrong, so its connection is closed";
  }
}

/// Each would hold a descriptor of this process, until there are none for ranks.
TEST(UnixSocket, OfStrangersWhoSayNothingTheOldestAreClosed) {
  constexpr size_t kStrangers = kMostSilent + 64;
  const auto here = Neighbours::here();
  Doorway door(*here);
  Handout handout(nvx::Card::of(0, "rank 0"));
  door.hand_out(&handout);
  for (const std::string& name : {door.name(), handout.name()}) {
    std::vector<LocalSocket> strangers;
    for (size_t i = 0; i < kStrangers; ++i) strangers.push_back(connect_to(without_words(name)));
    for (int i = 0; i < 3; ++i) door.serve(milliseconds(1));
    const auto is_closed = [](const LocalSocket& stranger) {
      char byte = 0;
      return recv(stranger.get(), &byte, sizeof byte, MSG_DONTWAIT) == 0;
    };
    EXPECT_EQ(size_t(std::ranges::count_if(strangers, is_closed)), kStrangers - kMostSilent);
    EXPECT_TRUE(is_closed(strangers.front()));
    EXPECT_FALSE(is_closed(strangers.back()));
  }
}

TEST(UnixSocket, NeitherSendsNorReceivesBlock) {
  const std::string name = fresh_socket_name();
  const LocalSocket listener = listen_on(name);
  const LocalSocket one = connect_to(name);
  LocalSocket other;
  accept_guests(listener, [&](LocalSocket guest) { other = std::move(guest); });
  ASSERT_TRUE(one && other);
  uint64_t word = 7;
  EXPECT_FALSE(receive_packet(other, &word, sizeof word, {}));
  EXPECT_EQ(errno, EAGAIN);
  int sent = 0;
  while (sent < 1'000'000 && send_packet(one, &word, sizeof word, {})) ++sent;
  EXPECT_EQ(errno, EAGAIN) << "after " << sent;
  for (int i = 0; i < sent; ++i) ASSERT_TRUE(receive_packet(other, &word, sizeof word, {}));
}

TEST(Handout, AReaderThatReadsNothingHoldsNobodyUpAndGetsItAllLater) {
  int queued = 10;
  std::ifstream("/proc/sys/net/unix/max_dgram_qlen") >> queued;
  const int sheets = std::min(queued + 20, 2000);
  Handout handout(nvx::Card::of(0, "rank 0"));
  Receipt slow(handout.name(), nvx::Card::of(1, "rank 1")), quick(handout.name(), nvx::Card::of(2, "rank 2"));
  for (int i = 0; i < sheets; ++i) {
    handout.give(std::vector<uint8_t>{uint8_t(i)});
    ASSERT_EQ(quick.next(seconds(20)), std::vector<uint8_t>{uint8_t(i)});
  }
  for (int i = 0; i < sheets; ++i) {
    handout.serve();
    ASSERT_EQ(slow.next(seconds(20)), std::vector<uint8_t>{uint8_t(i)});
  }
}

TEST(Handout, IsReachedOnceItsBacklogHasRoom) {
  Handout handout(nvx::Card::of(0, "rank 0"));
  fill_backlog(handout.name());
  Receipt receipt(handout.name(), nvx::Card::of(1, "rank 1"));
  EXPECT_TRUE(receipt.open());
  EXPECT_FALSE(receipt.next(milliseconds(20)));
  EXPECT_TRUE(receipt.open());
  std::atomic<bool> got{false};
  std::thread serving([&] {  // a handout belongs to one thread
    handout.give(std::vector<uint8_t>{5});
    while (!got) handout.serve();
  });
  EXPECT_EQ(receipt.next(seconds(20)), std::vector<uint8_t>{5});
  got = true;
  serving.join();
}

TEST(PoolServer, AFullBacklogIsNotWaitedForLong) {
  const std::string name = fresh_socket_name();
  const LocalSocket nobody = listen_on(name);
  fill_backlog(name);
  Fd fd;
  try {
    (void)ask_pool_server(name, {}, &fd, Deadline::after(milliseconds(50)));
    ADD_FAILURE() << "nobody answers there";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_NE(std::string(error.what()).find("backlog of its Unix socket was full for 50 ms"), std::string::npos)
        << error.what();
  }
}

// --- another user ---------------------------------------------------------------------------------------------------

struct Card {
  ArenaId arena;
  char door[48] = {};
  pid_t pid = 0;
};

/// Each rank's doorway, and what the others need to come there.
Card card_of(const std::shared_ptr<Neighbours>& here, const Doorway& door) {
  Card card{here->arena().id(), {}, getpid()};
  put(card.door, door.name());
  return card;
}

TEST(Flood, OfEachDoorwayDoesNotKeepRanksApart) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  constexpr int kRanks = 3;
  const SharedTable table(kRanks);
  all_end_well(kRanks, [&](int rank) {
    const auto here = Neighbours::here();
    const Span span = here->arena().allocate(4096);
    Doorway door(*here);
    const Flood flood({getpid()});
    flood.await(1);
    SharedExchange exchange(table, rank);
    const auto cards = read_cards<Card>(exchange.all_gather(bytes_of(card_of(here, door))), 1, of_rank);
    if (rank == kRanks - 1) std::this_thread::sleep_for(milliseconds(500));  // those who came wait for it meanwhile
    std::vector<Doorway::Wanted> wanted;
    for (int r = 0; r < kRanks; ++r) {
      if (r != rank) wanted.push_back({cards[size_t(r)].arena, cards[size_t(r)].door, cards[size_t(r)].pid});
    }
    const auto began = Clock::now();
    const auto met = door.fetch(wanted, Deadline::after(seconds(30)));
    std::printf("rank %d met the others after %lld ms\n", rank,
                (long long)std::chrono::duration_cast<milliseconds>(Clock::now() - began).count());
    for (const auto& [id, neighbour] : met) *neighbour->at(span.offset + size_t(rank)) = std::byte(1);
    const auto all_met = [&] {
      for (int r = 0; r < kRanks; ++r) {
        if (r != rank && *here->arena().at(span.offset + size_t(r)) != std::byte(1)) return false;
      }
      return true;
    };
    const Deadline deadline = Deadline::after(seconds(30));
    while (!all_met() && !deadline.passed(Clock::now())) door.serve(milliseconds(1));
    EXPECT_TRUE(all_met());
  });
}

TEST(Flood, OfARankThatDoesNotAnswerEndsInTimeAndIsSaid) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  const auto here = Neighbours::here();
  Doorway mine(*here), silent(*here);
  const Flood flood({getpid()});
  flood.await(2);
  const auto began = Clock::now();
  try {
    (void)mine.fetch({{ArenaId{1, 2}, silent.name(), getpid()}}, Deadline::after(milliseconds(500)));
    ADD_FAILURE() << "nobody answers there";
  } catch (const Error& error) {
    const std::string said = error.what();
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_NE(said.find("the backlog of its Unix socket is full, and other users, such as 65534, have made "),
              std::string::npos)
        << said;
    EXPECT_NE(error.failure().advice.find("whether another user of this host floods"), std::string::npos)
        << error.failure().advice;
  }
  EXPECT_LT(Clock::now() - began, seconds(5));
}

TEST(Flood, OfAPoolServerKeepsNobodyOut) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  Process mine(1), theirs(1);
  (void)theirs.registry->pool(0).allocate(2 * M);
  const Flood flood({getpid()});
  std::this_thread::sleep_for(milliseconds(200));  // its thread may keep up, so that it is never full
  for (int i = 0; i < 20; ++i) {
    const auto seen = mine.registry->peer_pool(0, {theirs.registry->id(), 0, theirs.registry->pool_socket()});
    seen->catch_up(2 * M, Deadline::after(seconds(30)));
    EXPECT_EQ(seen->mapped(), 2 * M);
  }
}

TEST(Flood, OfTheServersOfPeerMappingsDoesNotKeepRanksApart) {
  if (const char* why = Flood::why_not()) GTEST_SKIP() << why;
  const SharedTable table(3);
  all_end_well(3, [&](int rank) {
    const Flood flood({getpid()});
    SharedExchange exchange(table, rank);
    Process process(3);
    process.driver->lacks(ShareKind::kFabric);
    for (int i = 0; i < 3; ++i) {
      MappingOptions options = options_of(rank, 3, rank);
      options.timeout = seconds(20);
      const PeerMappings mappings(*process.registry, exchange, options);
      EXPECT_EQ(mappings.agreement().kind, ShareKind::kFd) << mappings.agreement().why_not_better;
      EXPECT_EQ(mappings.complaints(), "");
      write_and_look(mappings, exchange, rank, 3);
      (void)exchange.all_gather({});
    }
  });
}

}  // namespace
}  // namespace nvx::test
