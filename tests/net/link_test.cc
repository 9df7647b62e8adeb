// The contract of Link, the same for every kind of link.

#include <sys/socket.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <thread>

#include "net/ends.h"

namespace nvx::net::test {
namespace {

class Contract : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (is_ucx() && !why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  }

  bool is_ucx() const { return std::string(GetParam()) == "ucx"; }
  bool is_loopback() const { return std::string(GetParam()) == "loopback"; }
  std::unique_ptr<Link> open() { return is_loopback() ? net_.open() : open_link(GetParam()); }
  End& make() { return ends_.emplace_back(open()); }

  LoopbackNet net_;
  std::deque<End> ends_;
};

/// Two ends that know each other as peer 0.
class Pair : public Contract {
 protected:
  void SetUp() override {
    Contract::SetUp();
    if (IsSkipped()) return;
    a = &make();
    b = &make();
    a->link->add(b->link->address());
    b->link->add(a->link->address());
  }
  bool drive_both(const std::function<bool()>& until, milliseconds timeout = std::chrono::seconds(10)) {
    return drive({a->link.get(), b->link.get()}, timeout, until);
  }
  /// Connects both.
  void connect() {
    a->send(0, 1);
    b->send(0, 1);
    ASSERT_TRUE(drive_both([&] { return a->log.messages.size() == 1 && b->log.messages.size() == 1; }));
  }

  End* a = nullptr;
  End* b = nullptr;
};

std::string kind(const testing::TestParamInfo<const char*>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Links, Contract, testing::Values("loopback", "tcp", "ucx"), kind);
INSTANTIATE_TEST_SUITE_P(Links, Pair, testing::Values("loopback", "tcp", "ucx"), kind);

/// Checks the message with this seed in its header.
void expect_message(const EventLog& log, uint32_t seed, size_t bytes, size_t header_bytes = 4) {
  size_t found = 0;
  for (const EventLog::Message& message : log.messages) {
    uint32_t theirs = 0;
    if (message.header.size() != header_bytes) continue;
    std::memcpy(&theirs, message.header.data(), 4);
    if (theirs != seed) continue;
    ++found;
    EXPECT_EQ(message.body, pattern(bytes, seed)) << "message " << seed;
  }
  EXPECT_EQ(found, 1u) << "message " << seed;
}

TEST_P(Pair, CarriesMessagesOfAllSizes) {
  const size_t segment = a->link->segment_bytes();
  const std::vector<size_t> sizes = {0,           1,       7,       8,           4096,        8191,    65535,    65536,
                                     segment - 1, segment, 100'001, segment + 1, 2 * segment, 1 << 20, 3'000'003};
  for (size_t i = 0; i < sizes.size(); ++i) a->send(0, sizes[i], uint32_t(i));
  ASSERT_TRUE(drive_both([&] { return b->log.messages.size() == sizes.size() && a->all_done_once(); }));
  for (size_t i = 0; i < sizes.size(); ++i) expect_message(b->log, uint32_t(i), sizes[i]);
  EXPECT_EQ(a->log.failures, 0u);
}

TEST_P(Pair, CarriesHeadersOfAllSizes) {
  for (size_t bytes = 0; bytes <= kMostHeader; ++bytes) {
    a->send(0, bytes % 2 ? 0 : 100, uint32_t(bytes), bytes);
    ASSERT_TRUE(drive_both([&] { return b->log.messages.size() == bytes + 1; }));
    const EventLog::Message& message = b->log.messages.back();
    ASSERT_EQ(message.header.size(), bytes);
    EXPECT_TRUE(std::equal(message.header.begin(), message.header.end(), a->posts.back().header));
    EXPECT_EQ(message.body, a->bodies.back());
  }
}

TEST_P(Pair, CarriesManyAtOnceBothWays) {
  constexpr uint32_t kMany = 500;
  for (uint32_t i = 0; i < kMany; ++i) {
    a->send(0, i * 97 % 20'000, i);
    b->send(0, i * 89 % 20'000, i);
  }
  ASSERT_TRUE(drive_both([&] {
    return a->log.messages.size() == kMany && b->log.messages.size() == kMany && a->all_done_once() &&
           b->all_done_once();
  }));
  for (uint32_t i = 0; i < kMany; ++i) {
    expect_message(b->log, i, i * 97 % 20'000);
    expect_message(a->log, i, i * 89 % 20'000);
  }
}

TEST_P(Pair, CarriesPostsFromCallbacks) {
  constexpr size_t kRounds = 2000;
  const auto answer = [](End& end) {
    return [&end](const EventLog::Message& message) {
      if (end.log.messages.size() < kRounds) end.send(0, message.body.size(), uint32_t(end.log.messages.size()));
    };
  };
  a->log.on_arrival = answer(*a);
  b->log.on_arrival = answer(*b);
  a->send(0, 64);
  EXPECT_TRUE(drive_both([&] { return a->log.messages.size() >= kRounds - 1 && a->all_done_once(); }));
}

TEST_P(Pair, RequestsAPlaceForLongMessages) {
  const size_t bytes = 3 * a->link->segment_bytes() + 5;
  for (const bool places : {true, false}) {
    b->log.gives_places = places;
    b->log.messages.clear();
    a->send(0, bytes, 3);
    ASSERT_TRUE(drive_both([&] { return b->log.messages.size() == 1 && a->all_done_once(); }));
    EXPECT_EQ(b->log.messages[0].placed, places);
    expect_message(b->log, 3, bytes);
  }
  EXPECT_EQ(b->log.places_requested, 2u);
  EXPECT_EQ(b->log.placed_headers.size(), 1u);
  EXPECT_EQ(b->log.drops, 0u);
}

TEST_P(Pair, KeepsAPostUntilItIsDone) {
  // The body may change only after done().
  const size_t bytes = 4 * a->link->segment_bytes();
  for (uint32_t i = 0; i < 20; ++i) {
    const Post& post = a->send(0, i % 2 ? bytes : 1000, i);
    ASSERT_TRUE(drive_both([&] { return a->log.dones[&post] == 1; }));
    std::fill(a->bodies.back().begin(), a->bodies.back().end(), std::byte(0xee));
    std::memset(a->posts.back().header, 0xee, kMostHeader);
  }
  ASSERT_TRUE(drive_both([&] { return b->log.messages.size() == 20; }));
  for (uint32_t i = 0; i < 20; ++i) expect_message(b->log, i, i % 2 ? bytes : 1000);
}

TEST_P(Pair, CanBeUsedByThreadsInTurn) {
  constexpr int kThreads = 3, kEach = 200;
  std::mutex a_mutex, b_mutex;
  std::atomic<int> running{kThreads};
  std::atomic<bool> late{false};
  const auto stop = Clock::now() + std::chrono::seconds(20);
  const auto work = [&](int thread) {
    for (int i = 0; i < kEach; ++i) {
      std::lock_guard lock(a_mutex);
      a->send(0, size_t(i) * 50, uint32_t(thread * kEach + i));
      a->link->progress();
    }
    --running;
    for (;;) {
      {
        std::lock_guard lock(a_mutex);
        a->link->progress();
        if (running == 0 && a->all_done_once()) return;
      }
      late = late || Clock::now() > stop;
      if (late) return;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  };
  const auto take = [&] {
    for (;;) {
      bool armed = false;
      {
        std::lock_guard lock(b_mutex);
        while (b->link->progress()) {
        }
        if (b->log.messages.size() == kThreads * kEach) return;
        armed = b->link->arm();
      }
      if (late) return;
      if (armed) b->link->sleep(milliseconds(1));
    }
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (int t = 0; t < 2; ++t) threads.emplace_back(take);
  for (std::thread& thread : threads) thread.join();
  ASSERT_FALSE(late);
  for (int i = 0; i < kThreads * kEach; ++i) expect_message(b->log, uint32_t(i), size_t(i % kEach) * 50);
}

TEST_P(Pair, SleepEndsWhenSomethingComes) {
  connect();
  for (int round = 0; round < 10; ++round) {
    while (!(b->link->progress(), b->link->arm())) {
    }
    const auto began = Clock::now();
    Clock::time_point posted;
    std::thread sender([&] {
      std::this_thread::sleep_for(milliseconds(20));
      posted = Clock::now();
      a->send(0, 100);
      while (a->link->progress()) {
      }
    });
    b->link->sleep(std::chrono::seconds(5));
    const auto woken = Clock::now();
    sender.join();
    EXPECT_GE(woken - began, milliseconds(19)) << "slept though nothing had arrived";
    EXPECT_LT(woken - posted, milliseconds(1000)) << "slept on though something had arrived";
    const size_t had = b->log.messages.size();
    ASSERT_TRUE(drive_both([&] { return b->log.messages.size() > had; }));
  }
}

TEST_P(Pair, SleepLastsTheGivenSpan) {
  connect();
  drive_both([] { return false; }, milliseconds(20));
  while (!(a->link->progress(), a->link->arm())) {
  }
  for (const int ms : {1, 10, 60}) {
    const auto began = Clock::now();
    a->link->sleep(milliseconds(ms));
    const auto slept = Clock::now() - began;
    EXPECT_GE(slept, milliseconds(ms) - std::chrono::microseconds(100));
    EXPECT_LT(slept, milliseconds(ms + 2000));
  }
}

TEST_P(Pair, WakeEndsSleeps) {
  const auto nap = [&] {
    const auto began = Clock::now();
    a->link->sleep(std::chrono::seconds(5));
    return Clock::now() - began;
  };
  std::vector<std::thread> sleepers;
  std::atomic<int> awake{0};
  for (int i = 0; i < 3; ++i) {
    sleepers.emplace_back([&] {
      EXPECT_LT(nap(), std::chrono::seconds(2));
      ++awake;
    });
  }
  std::this_thread::sleep_for(milliseconds(300));  // until all sleep
  EXPECT_EQ(awake, 0);
  a->link->wake();
  for (std::thread& sleeper : sleepers) sleeper.join();
  a->link->wake();  // without a sleeper, the next sleep ends at once
  EXPECT_LT(nap(), std::chrono::seconds(1));
  const auto began = Clock::now();
  a->link->sleep(milliseconds(30));
  EXPECT_GE(Clock::now() - began, milliseconds(29)) << "one wake() ended two sleeps";
}

TEST_P(Pair, DoesNotSleepWhenSomethingIsPending) {
  connect();
  drive_both([] { return false; }, milliseconds(20));
  while (!(b->link->progress(), b->link->arm())) {
  }
  a->send(0, 10);
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  std::this_thread::sleep_for(milliseconds(20));
  const auto began = Clock::now();
  if (b->link->arm()) b->link->sleep(std::chrono::seconds(5));
  EXPECT_LT(Clock::now() - began, milliseconds(2000)) << "slept though a message had arrived";
}

TEST_P(Pair, PostCallsNoCallback) {
  // post() makes no callback, however the post ends.
  connect();
  const size_t ended = a->log.ended;
  a->send(0, 0);
  a->send(0, 10'000);
  EXPECT_EQ(a->log.ended, ended);
  EXPECT_TRUE(drive_both([&] { return a->all_done_once(); }));
}

TEST_P(Pair, GoesOnBehindACallbackThatThrows) {
  if (is_loopback()) return;
  connect();
  a->log.on_done = [] { throw std::bad_alloc(); };
  for (int i = 0; i < 3; ++i) a->send(0, 100);
  const auto all_done = [this] { return a->all_done_once(); };
  EXPECT_THROW(drive_both(all_done), std::bad_alloc);
  EXPECT_TRUE(drive_both(all_done));
}

/// The sockets of this process, or those that listen, that have a filter.
int filtered_sockets(bool listening) {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) {
    int listens = 0;
    socklen_t bytes = sizeof listens, instructions = 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || (listens != 0) != listening) continue;
    count += getsockopt(fd, SOL_SOCKET, SO_GET_FILTER, nullptr, &instructions) == 0 && instructions != 0;
  }
  return count;
}

/// The filter of the listeners would run for every packet.
TEST_P(Pair, ItsConnectionsHaveNoFilter) {
  if (is_loopback()) return;
  connect();
  EXPECT_TRUE(drive_both([] { return filtered_sockets(false) == 0; }));
  EXPECT_GE(filtered_sockets(true), 2);
}

TEST_P(Pair, LosesAPeerThatCloses) {
  connect();
  b->link->close();
  const auto began = Clock::now();
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->log.losses[0] == 1; }));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
  a->send(0, 100);
  a->send(0, 10 * a->link->segment_bytes());
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  EXPECT_EQ(a->log.failures, 2u);
  EXPECT_EQ(a->log.losses[0], 1);
}

TEST_P(Pair, CompletedSendsArriveAfterSenderCloses) {
  connect();
  for (uint32_t i = 1; i <= 50; ++i) a->send(0, 3000, i);
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  std::thread closer([&] { a->link->close(); });
  EXPECT_TRUE(drive({b->link.get()}, [&] { return b->log.losses[0] == 1; }));
  closer.join();
  EXPECT_EQ(b->log.messages.size(), 51u);
  for (uint32_t i = 1; i <= 50; ++i) expect_message(b->log, i, 3000);
}

TEST_P(Pair, CloseEndsOpenPostsAndIsBounded) {
  connect();
  // b is not driven, so nothing is received.
  for (uint32_t i = 0; i < 40; ++i) a->send(0, 1 << 20, i);
  a->link->progress();
  const auto began = Clock::now();
  a->link->close();
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
  EXPECT_TRUE(a->all_done_once());
  EXPECT_TRUE(drive({b->link.get()}, [&] { return b->log.losses[0] == 1; }));
  const auto placed = [&] {
    return std::count_if(b->log.messages.begin(), b->log.messages.end(), [](const auto& m) { return m.placed; });
  };
  EXPECT_TRUE(drive({b->link.get()}, [&] { return b->log.places.size() == b->log.drops + size_t(placed()); }));
}

TEST_P(Pair, APostThatIsOpenEndsWhenThePeerCloses) {
  connect();
  for (uint32_t i = 0; i < 20; ++i) a->send(0, 4 << 20, i);
  a->link->progress();
  b->link->close();
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once() && a->log.losses[0] == 1; }));
  EXPECT_GE(a->log.failures, 1u);
}

TEST_P(Pair, APlaceIsGivenBackWhenItsPeerCloses) {
  connect();
  if (is_loopback()) GTEST_SKIP() << "bodies are copied at one go";
  a->send(0, 64 << 20, 1);
  ASSERT_TRUE(drive_both([&] { return b->log.places_requested == 1; }));
  a->link->close();
  EXPECT_TRUE(drive({b->link.get()}, [&] { return b->log.losses[0] == 1; }));
  EXPECT_TRUE(drive({b->link.get()}, [&] { return b->log.drops + b->log.messages.size() == 2; }));
}

TEST_P(Pair, CloseGivesBackPlaces) {
  connect();
  if (is_loopback()) GTEST_SKIP() << "bodies are copied at one go";
  a->send(0, 64 << 20, 1);
  ASSERT_TRUE(drive_both([&] { return b->log.places_requested == 1; }));
  b->link->close();
  EXPECT_EQ(b->log.drops + b->log.messages.size(), 2u);
  EXPECT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
}

TEST_P(Pair, ForgetsAndConnectsAgain) {
  connect();
  for (uint32_t round = 1; round <= 5; ++round) {
    a->link->forget(round - 1);
    const PeerId again = a->link->add(b->link->address());
    EXPECT_EQ(again, round);
    a->send(again, 100, round);
    ASSERT_TRUE(drive_both([&] { return b->log.messages.size() == 1 + round && a->all_done_once(); }));
    expect_message(b->log, round, 100);
    b->send(0, 200, round);
    ASSERT_TRUE(drive_both([&] { return a->log.messages.size() == 1 + round; })) << "round " << round;
  }
  EXPECT_TRUE(a->log.losses.empty());
  EXPECT_TRUE(b->log.losses.empty());
  EXPECT_EQ(a->log.failures + b->log.failures, 0u);
}

TEST_P(Pair, CompletedSendsArriveAfterReceiverIsForgotten) {
  connect();
  for (uint32_t i = 1; i <= 20; ++i) a->send(0, 5000, i);
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  a->link->forget(0);
  EXPECT_TRUE(drive_both([&] { return b->log.messages.size() == 21; }));
  drive_both([] { return false; }, milliseconds(100));
  EXPECT_TRUE(b->log.losses.empty());
}

TEST_P(Pair, ForgettingEndsWhatIsOpen) {
  connect();
  for (uint32_t i = 0; i < 20; ++i) a->send(0, 4 << 20, i);
  a->link->progress();
  a->link->forget(0);
  const auto began = Clock::now();
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  EXPECT_LT(Clock::now() - began, milliseconds(1500));
  a->send(0, 1);
  ASSERT_TRUE(drive({a->link.get()}, [&] { return a->all_done_once(); }));
  drive_both([] { return false; }, milliseconds(200));
  EXPECT_TRUE(a->log.losses.empty());
  EXPECT_TRUE(b->log.losses.empty());
}

TEST_P(Pair, AForgottenPeerIsNotLost) {
  connect();
  a->link->forget(0);
  b->link->close();
  drive_for(milliseconds(200), {a->link.get()});
  EXPECT_TRUE(a->log.losses.empty());
  a->link->forget(0);
  a->link->forget(99);
}

TEST_P(Contract, OneProcessMayBeAddedTwice) {
  End &a = make(), &b = make();
  const PeerId first = a.link->add(b.link->address()), second = a.link->add(b.link->address());
  EXPECT_NE(first, second);
  a.send(first, 10, 1);
  a.send(second, 20, 2);
  const std::vector<Link*> both = {a.link.get(), b.link.get()};
  ASSERT_TRUE(drive(both, [&] { return b.log.messages.size() == 2; }));
  a.link->forget(first);
  a.send(second, 30, 3);
  ASSERT_TRUE(drive(both, [&] { return b.log.messages.size() == 3; }));
  b.link->close();
  ASSERT_TRUE(drive({a.link.get()}, [&] { return a.log.losses[second] == 1; }));
  EXPECT_EQ(a.log.losses.count(first), 0u);
}

TEST_P(Contract, TwoLinksOfOneProcessReachTheSamePeer) {
  End &a = make(), &b = make(), &c = make();
  a.link->add(c.link->address());
  b.link->add(c.link->address());
  const PeerId to_a = c.link->add(a.link->address()), to_b = c.link->add(b.link->address());
  const std::vector<Link*> all = {a.link.get(), b.link.get(), c.link.get()};
  a.send(0, 10, 1);
  b.send(0, 10, 2);
  c.send(to_a, 10, 3);
  c.send(to_b, 10, 4);
  ASSERT_TRUE(drive(
      all, [&] { return a.log.messages.size() == 1 && b.log.messages.size() == 1 && c.log.messages.size() == 2; }));
  expect_message(a.log, 3, 10);
  expect_message(b.log, 4, 10);
  a.link->close();
  ASSERT_TRUE(drive({b.link.get(), c.link.get()}, [&] { return c.log.losses[to_a] == 1; }));
  b.send(0, 10, 5);
  ASSERT_TRUE(drive({b.link.get(), c.link.get()}, [&] { return c.log.messages.size() == 3; }));
  EXPECT_EQ(c.log.losses.count(to_b), 0u);
}

TEST_P(Contract, ReachesManyPeers) {
  constexpr int kPeers = 12;
  End& hub = make();
  std::vector<Link*> links = {hub.link.get()};
  std::vector<End*> spokes;
  for (int i = 0; i < kPeers; ++i) {
    spokes.push_back(&make());
    links.push_back(spokes.back()->link.get());
    EXPECT_EQ(hub.link->add(spokes.back()->link->address()), PeerId(i));
    spokes.back()->link->add(hub.link->address());
  }
  for (int i = 0; i < kPeers; ++i) {
    hub.send(PeerId(i), 100, uint32_t(i));
    spokes[size_t(i)]->send(0, 50, uint32_t(100 + i));
  }
  ASSERT_TRUE(drive(links, [&] {
    return hub.log.messages.size() == kPeers &&
           std::all_of(spokes.begin(), spokes.end(), [](End* s) { return s->log.messages.size() == 1; });
  }));
  for (int i = 0; i < kPeers; ++i) expect_message(spokes[size_t(i)]->log, uint32_t(i), 100);
}

TEST_P(Contract, NoticesTheLossOfAPeerThatOnlyEverSent) {
  End &a = make(), &b = make();
  a.link->add(b.link->address());
  a.send(0, 10, 1);
  const std::vector<Link*> both = {a.link.get(), b.link.get()};
  ASSERT_TRUE(drive(both, [&] { return b.log.messages.size() == 1; }));  // before b has added a
  b.link->add(a.link->address());
  drive_for(milliseconds(100), both);
  a.link->close();
  EXPECT_TRUE(drive({b.link.get()}, std::chrono::seconds(2), [&] { return b.log.losses[0] == 1; }));
}

TEST_P(Contract, RefusesWhatIsNoAddress) {
  End &a = make(), &b = make();
  const std::vector<std::byte> address = b.link->address();
  EXPECT_THROW(a.link->add({}), Error);
  EXPECT_THROW(a.link->add(std::span(address).first(address.size() - 1)), Error);
  std::vector<std::byte> longer = address, other = address;
  longer.push_back(std::byte(0));
  EXPECT_THROW(a.link->add(longer), Error);
  other[0] ^= std::byte(1);
  EXPECT_THROW(a.link->add(other), Error);
  EXPECT_EQ(a.link->add(address), 0u) << "a refused address takes no number";
}

TEST_P(Contract, CloseIsIdempotentAndNeedsNoPeer) {
  End& a = make();
  a.link->progress();
  a.link->close();
  a.link->close();
  EXPECT_FALSE(a.link->progress());
}

TEST_P(Contract, DescribesItself) {
  End& a = make();
  EXPECT_FALSE(a.link->describe().empty());
  EXPECT_GE(a.link->segment_bytes(), 4096u);
}

}  // namespace
}  // namespace nvx::net::test
