// Sends and receives: any sizes, tags and orders, from any rank, concurrently; and the errors of a mailbox whose peer
// ends, leaves, is late or sends false data.

#include "group/p2p/mailbox.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <random>
#include <set>
#include <thread>

#include "support/groups.h"
#include "support/hosts.h"
#include "support/impostor.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using Request = std::shared_ptr<Message>;

constexpr size_t kCarried = kernel::kEnvelopePayload;  // the longest message that fits into its envelope

/// Message number `n` of `bytes` bytes from rank `from` to rank `to`.
Bytes payload(int from, int to, size_t n, size_t bytes) { return input(DType::kBytes, bytes, from * 64 + to, n); }

TEST(Mailbox, MessagesOfAllSizesArriveWhole) {
  in_group("sizes", 2, [&](Group& group, int rank) {
    size_t number = 0;
    for (const size_t bytes :
         {size_t(0), size_t(1), kCarried - 1, kCarried, kCarried + 1, size_t(65'537), size_t(5'000'001)}) {
      for (const int sender : {0, 1}) {
        Bytes out = payload(sender, 1 - sender, ++number, bytes);
        Tensor in(bytes, number % 3);
        const Request request =
            rank == sender ? message(1 - rank, 0, out.data(), bytes) : message(sender, 0, in.data(), bytes);
        const Status status = rank == sender ? send_now(group, request) : receive_now(group, request);
        ASSERT_TRUE(status.ok()) << status.what();
        if (rank == sender) continue;
        EXPECT_TRUE(in.holds(out)) << bytes;
        EXPECT_TRUE(in.guards_are_whole());
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// A message takes its place before it is pushed, and the peer gets no envelope before that.
TEST(Mailbox, PostedMessageKeepsItsPlaceUntilItIsPushed) {
  in_group("post", 2, [&](Group& group, int rank) {
    Bytes first = payload(0, 1, 1, 100), second = payload(0, 1, 2, 100);
    if (rank == 0) {
      bool reported = false;
      const Request posted = message(1, 0, first.data(), first.size());
      posted->finished = [&](const Message&) { reported = true; };
      group.mailbox().post(posted);
      EXPECT_FALSE(reported);
      ASSERT_TRUE(barrier(group).ok());
      const Request sent = message(1, 0, second.data(), second.size());
      group.mailbox().send(sent, Runner::kCaller);
      group.mailbox().push(Runner::kCaller);
      ASSERT_TRUE(group.mailbox().wait(*posted).ok() && group.mailbox().wait(*sent).ok());
      EXPECT_TRUE(reported);
    } else {
      ASSERT_TRUE(barrier(group).ok());
      for (const Bytes& wanted : {first, second}) {
        Bytes in(100);
        const Request request = message(0, 0, in.data(), in.size());
        ASSERT_TRUE(receive_now(group, request).ok());
        EXPECT_TRUE(in == wanted);
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(Mailbox, AReceiveFromAnySourceReturnsTheSource) {
  constexpr int kRanks = 4;
  in_group("any source", kRanks, [&](Group& group, int rank) {
    if (rank != 0) {
      Bytes out = payload(rank, 0, 0, 4000);
      const Request request = message(0, 5, out.data(), out.size());
      ASSERT_TRUE(send_now(group, request).ok());
    } else {
      std::vector<bool> received(kRanks);
      for (int i = 1; i < kRanks; ++i) {
        Bytes in(4000);
        const Request request = message(kAnySource, 5, in.data(), in.size());
        ASSERT_TRUE(receive_now(group, request).ok());
        ASSERT_GE(request->peer, 1);
        EXPECT_FALSE(received[size_t(request->peer)]);
        received[size_t(request->peer)] = true;
        EXPECT_TRUE(in == payload(request->peer, 0, 0, 4000));
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(Mailbox, ARankMayWriteToItself) {
  MemoryStore store;
  Group group(store, options("self", 0, 1));
  for (const size_t bytes : {size_t(10), size_t(100'000)}) {
    Bytes out = payload(0, 0, 1, bytes), in(bytes);
    const Request receive = message(0, 1, in.data(), bytes), send = message(0, 1, out.data(), bytes);
    group.mailbox().receive(receive, Runner::kPool);
    group.mailbox().send(send, Runner::kPool);
    ASSERT_TRUE(group.mailbox().wait(*send).ok());
    ASSERT_TRUE(group.mailbox().wait(*receive).ok());
    EXPECT_TRUE(in == out);
  }
}

/// Random programs: every pair of ranks exchanges messages of random sizes and tags. Each rank posts all of them at
/// once in its own order and waits in another. Every finished() is called once.
TEST(Mailbox, RandomProgramsArriveWhole) {
  struct Planned {
    int from, to;
    size_t number, bytes;
  };
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const int ranks = 2 + int(seed % 3);
    std::vector<Planned> plan;
    std::mt19937 random(seed);
    for (size_t n = 0; n < 60; ++n) {
      const size_t bytes = random() % 3 == 0 ? random() % 200'000 : random() % 1500;
      plan.push_back({int(random() % uint32_t(ranks)), int(random() % uint32_t(ranks)), n, bytes});
    }
    in_group("random", ranks, [&](Group& group, int rank) {
      std::mt19937 mine(seed * 16 + uint32_t(rank));
      struct Posted {
        Planned planned;
        Bytes memory;
        Request request;
      };
      std::vector<Posted> posted;
      for (const Planned& l : plan) {
        if (l.from == rank) posted.push_back({l, payload(l.from, l.to, l.number, l.bytes), nullptr});
        if (l.to == rank) posted.push_back({{-1, l.from, l.number, l.bytes}, Bytes(l.bytes), nullptr});
      }
      std::shuffle(posted.begin(), posted.end(), mine);
      std::atomic<int> finished{0};
      for (Posted& p : posted) {
        p.request = message(p.planned.to, int64_t(p.planned.number), p.memory.data(), p.memory.size());
        p.request->finished = [&](const Message&) { ++finished; };
        const bool sends = p.planned.from == rank;
        sends ? group.mailbox().send(p.request, Runner::kPool) : group.mailbox().receive(p.request, Runner::kPool);
      }
      std::shuffle(posted.begin(), posted.end(), mine);
      for (Posted& p : posted) {
        const Status status = group.mailbox().wait(*p.request);
        ASSERT_TRUE(status.ok()) << status.what();
        if (p.planned.from == rank) continue;
        EXPECT_TRUE(p.memory == payload(p.planned.to, rank, p.planned.number, p.planned.bytes)) << "seed " << seed;
      }
      EXPECT_EQ(finished, int(posted.size()));
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

/// An asynchronous send and receive end although no thread waits for them.
TEST(Mailbox, TheProgressThreadFinishesMessagesWithoutAWaiter) {
  in_group("progress", 2, [&](Group& group, int rank) {
    Bytes memory = rank == 0 ? payload(0, 1, 0, 3'000'000) : Bytes(3'000'000);
    const Request request = message(1 - rank, 0, memory.data(), memory.size());
    rank == 0 ? group.mailbox().send(request, Runner::kPool) : group.mailbox().receive(request, Runner::kPool);
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return request->done(); }));
    EXPECT_TRUE(request->status().ok());
    EXPECT_TRUE(memory == payload(0, 1, 0, 3'000'000));
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// A callback waits for an effect of another message, on any thread.
TEST(Mailbox, ACallbackThatBlocksDelaysNoOtherMessage) {
  for (const Runner runner : {Runner::kPool, Runner::kCaller}) {
    in_group("blocks", 2, [&](Group& group, int rank) {
      std::atomic<bool> waited{false};
      std::vector<Bytes> memory(2, Bytes(3'000'000));
      std::vector<Request> requests;
      for (size_t i = 0; i < 2; ++i) {
        requests.push_back(message(1 - rank, int64_t(i), memory[i].data(), i == 0 ? 10 : memory[i].size()));
      }
      requests[0]->finished = [&](const Message&) {
        waited = eventually(milliseconds(20'000), [&] { return requests[1]->done(); });
      };
      if (rank == 0) {
        group.mailbox().receive(requests[1], runner);
        group.mailbox().receive(requests[0], runner);
      } else {  // the awaited message comes only after the other
        requests[0]->finished = nullptr;
        group.mailbox().send(requests[0], runner);
        std::this_thread::sleep_for(milliseconds(100));
        group.mailbox().send(requests[1], runner);
      }
      if (runner == Runner::kPool) {
        EXPECT_TRUE(eventually(milliseconds(30'000), [&] { return requests[1]->done(); }));
      }
      for (const Request& request : requests) EXPECT_TRUE(group.mailbox().wait(*request).ok());
      EXPECT_EQ(waited, rank == 0);
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

/// A callback may wait for its own message, which is done, and for others that are done but not yet reported.
TEST(Mailbox, ACallbackMayWaitForMessages) {
  MemoryStore store;
  Group group(store, options("waits", 0, 1));
  Bytes memory(100);
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(message(0, i, memory.data(), memory.size()));
  std::atomic<int> ended{0};
  for (const Request& request : requests) {
    request->finished = [&](const Message&) {
      for (const Request& any : requests) EXPECT_FALSE(group.mailbox().wait(*any).ok());
      ++ended;
    };
    group.mailbox().receive(request, Runner::kCaller);
  }
  group.abort("so that all end at once");
  for (const Request& request : requests) EXPECT_FALSE(group.mailbox().wait(*request).ok());
  EXPECT_EQ(ended, 4) << "a waiter returns when the callback has";
}

TEST(Mailbox, ACallbackThatThrowsHarmsNoMessage) {
  MemoryStore store;
  Group group(store, options("throws", 0, 1));
  Bytes out(100), in(100);
  for (const bool by_pool : {false, true}) {
    const Request send = message(0, 0, out.data(), out.size()), receive = message(0, 0, in.data(), in.size());
    send->finished = [](const Message&) { throw std::runtime_error("of a callback"); };
    receive->finished = [](const Message&) { throw 7; };
    group.mailbox().send(send, Runner::kPool);
    group.mailbox().receive(receive, Runner::kPool);
    if (by_pool) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return receive->done(); }));
    }
    EXPECT_TRUE(group.mailbox().wait(*send).ok());
    EXPECT_TRUE(group.mailbox().wait(*receive).ok());
  }
}

/// If no thread can be created, the waiters progress the messages.
TEST(Mailbox, GoesOnWithoutThreads) {
  ThreadPool::instance().limit(0);
  in_group("no threads", 2, [&](Group& group, int rank) {
    Bytes out = payload(rank, 1 - rank, 0, 3'000'000), in(3'000'000);
    const Request receive = message(1 - rank, 0, in.data(), in.size()),
                  send = message(1 - rank, 0, out.data(), out.size());
    std::atomic<int> finished{0};
    receive->finished = send->finished = [&](const Message&) { ++finished; };
    group.mailbox().receive(receive, Runner::kPool);
    group.mailbox().send(send, Runner::kPool);
    EXPECT_TRUE(group.mailbox().wait(*send).ok());
    EXPECT_TRUE(group.mailbox().wait(*receive).ok());
    EXPECT_EQ(finished, 2);
    EXPECT_TRUE(in == payload(1 - rank, rank, 0, 3'000'000));
    ASSERT_TRUE(barrier(group).ok());
  });
  ThreadPool::instance().limit(SIZE_MAX);
}

/// Staging that no message needs is available to other groups.
TEST(Mailbox, StagingRestsWhenNothingIsOnItsWay) {
  in_group("rests", 2, [&](Group& group, int rank) {
    for (int round = 0; round < 2; ++round) {
      Bytes memory = rank == 0 ? payload(0, 1, 0, 1'000'000) : Bytes(1'000'000);
      const Request request = message(1 - rank, 0, memory.data(), memory.size());
      ASSERT_TRUE((rank == 0 ? send_now(group, request) : receive_now(group, request)).ok());
      EXPECT_TRUE(memory == payload(0, 1, 0, 1'000'000));
      ASSERT_TRUE(barrier(group).ok());
      const Span span = group.mailbox().release_idle();
      EXPECT_EQ(bool(span), rank == 0);
      if (span) group.core().shm().leases().release(span);
      EXPECT_FALSE(group.mailbox().release_idle());
    }
  });
}

/// A message that begins after all earlier ones have been read is in another part of the lease.
TEST(Mailbox, StagingRotates) {
  in_group("rotates", 2, [&](Group& group, int rank) {
    constexpr size_t kBytes = 100 << 10, kPart = LeasePool::kSmallest;  // the least part of a message
    const size_t rotates = std::max(kPart, rotation(group.plan_facts()));
    std::set<uint64_t> places;
    for (size_t n = 0; n < 2 * rotates / kBytes; ++n) {
      Bytes memory = rank == 0 ? payload(0, 1, n, kBytes) : Bytes(kBytes);
      const Request request = message(1 - rank, 0, memory.data(), memory.size());
      ASSERT_TRUE((rank == 0 ? send_now(group, request) : receive_now(group, request)).ok());
      EXPECT_TRUE(memory == payload(0, 1, n, kBytes));
      ASSERT_TRUE(barrier(group).ok());
      places.insert(group.core().members.pad(0).outbox(1).lease_offset);
    }
    EXPECT_EQ(places.size(), (rotates - kPart) / kBytes + 1);
  });
}

/// Beyond a limit, the sender holds messages that have no receive. A later receive gets them in order.
void flood(const std::function<GroupOptions(int)>& options_of, size_t count = 8000, size_t each = 900,
           size_t most_kept = 6 << 20) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options_of(rank));
    Bytes last(10), all = rank == 1 ? payload(1, 0, 0, count * each) : Bytes(count * each);
    const Request request = message(1 - rank, 1, last.data(), last.size());
    std::vector<Request> requests;
    for (size_t i = 0; i < count; ++i) requests.push_back(message(1 - rank, 7, all.data() + i * each, each));
    if (rank == 0) {
      ASSERT_TRUE(receive_now(group, request).ok());
      ASSERT_TRUE(barrier(group).ok());
      for (const Request& one : requests) group.mailbox().receive(one, Runner::kCaller);
    } else {
      for (const Request& one : requests) group.mailbox().send(one, Runner::kPool);
      group.mailbox().send(request, Runner::kPool);
      ASSERT_TRUE(group.mailbox().wait(*request).ok());
      const auto done = [](const Request& one) { return one->done(); };
      EXPECT_LT(size_t(std::count_if(requests.begin(), requests.end(), done)) * each, most_kept);
      ASSERT_TRUE(barrier(group).ok());
    }
    for (const Request& one : requests) ASSERT_TRUE(group.mailbox().wait(*one).ok());
    EXPECT_TRUE(all == payload(1, 0, 0, count * each));
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(Mailbox, AFloodWithoutReceivesIsBounded) {
  flood([](int rank) { return options("flood", rank, 2); });
}

TEST(Mailbox, AFloodFromAnotherHostIsBounded) {
  Hosts hosts({0, 1});
  flood([&](int rank) { return hosts.options("far flood", rank); });
  flood([&](int rank) { return hosts.options("far flood of longer messages", rank); }, 600,
        net::PointToPoint::kMostEager, 7 << 20);
}

// ---- failures

TEST(MailboxFailure, SizesThatDifferAreNamed) {
  const auto differ = [](Group& group, int rank, size_t other) {
    Bytes memory(rank == 0 ? 2000 : other);
    const Request request = message(1 - rank, 3, memory.data(), memory.size());
    const Status status = rank == 0 ? send_now(group, request) : receive_now(group, request);
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.what().find("sends 2000 elements"), std::string::npos) << status.what();
    EXPECT_NE(status.what().find("receives " + std::to_string(other) + " elements"), std::string::npos)
        << status.what();
    const bool advises = status.what().find(". Next: give both tensors the same number") != std::string::npos;
    EXPECT_TRUE(advises || status.code() == Code::kPeerFailed) << status.what();
  };
  for (const size_t other : {size_t(1999), kNoteBytes}) {
    in_group("differ", 2, [&](Group& group, int rank) { differ(group, rank, other); });
  }
}

TEST(MailboxFailure, ATimeoutNamesTheSender) {
  std::atomic<bool> over{false};
  in_group("late", 2, [&](Group& group, int rank) {
    EXPECT_TRUE(rank == 0 || eventually(milliseconds(20'000), [&] { return over.load(); }));
    if (rank == 1) return;
    Bytes memory(10);
    const Request request = message(1, 3, memory.data(), memory.size());
    request->timeout = milliseconds(150);
    const auto began = Clock::now();
    const Status status = receive_now(group, request);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_NE(status.what().find("rank 1 (pid"), std::string::npos) << status.what();
    over = true;
  });
}

/// As for gloo: a program may post a receive long before the peer sends.
TEST(MailboxFailure, ATimeoutFromTheWaitComesAfterTheWait) {
  std::atomic<int> step{0};
  in_group("early", 2, [&](Group& group, int rank) {
    Bytes memory(10);
    if (rank == 1) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return step == 1; }));
      EXPECT_TRUE(send_now(group, message(0, 3, memory.data(), memory.size())).ok());
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return step == 2; }));
      return;
    }
    const auto post = [&] {
      const Request request = message(1, 3, memory.data(), memory.size());
      request->timeout = milliseconds(150);
      request->timed_from_wait = true;
      group.mailbox().receive(request, Runner::kPool);
      return request;
    };
    const Request first = post();
    std::this_thread::sleep_for(milliseconds(600));
    EXPECT_FALSE(first->done());
    step = 1;
    EXPECT_TRUE(group.mailbox().wait(*first).ok());

    const Request waited = post();
    std::this_thread::sleep_for(milliseconds(600));
    const Status late = group.mailbox().wait(*waited);
    EXPECT_EQ(late.code(), Code::kTimeout);
    const size_t span = late.what().find("after ");
    ASSERT_NE(span, std::string::npos) << late.what();
    EXPECT_LT(std::atof(late.what().c_str() + span + 6), 0.6) << late.what();  // of the wait, not of the receive
    step = 2;
  });
}

/// A receive times out although other messages keep coming.
TEST(MailboxFailure, ATimeoutComesWhateverElseDoes) {
  std::atomic<bool> over{false};
  in_group("steady", 2, [&](Group& group, int rank) {
    Bytes memory(100), other(100);
    if (rank == 1) {
      const auto end = Clock::now() + std::chrono::seconds(20);
      while (!over && Clock::now() < end) {
        const Request request = message(0, 1, memory.data(), memory.size());
        if (!send_now(group, request).ok()) break;
      }
      return;
    }
    const Request late = message(1, 0, memory.data(), memory.size());
    late->timeout = milliseconds(300);
    group.mailbox().receive(late, Runner::kPool);  // no thread waits for it
    const auto began = Clock::now();
    while (!late->done() && Clock::now() - began < std::chrono::seconds(15)) {
      const Request request = message(1, 1, other.data(), other.size());
      if (!receive_now(group, request).ok()) break;
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
    ASSERT_TRUE(late->done());
    EXPECT_EQ(late->status().code(), Code::kTimeout);
    over = true;
  });
}

/// While other ranks remain, a rank that left in good order does not end a receive from any source.
TEST(MailboxFailure, AReceiveFromAnySourceOutlivesARankThatLeft) {
  in_group("outlives", 3, [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 1) return;
    Bytes memory(50, std::byte(rank));
    if (rank == 2) std::this_thread::sleep_for(milliseconds(400));
    const Request request = message(rank == 2 ? 0 : kAnySource, 0, memory.data(), memory.size());
    const Status status = rank == 2 ? send_now(group, request) : receive_now(group, request);
    EXPECT_TRUE(status.ok()) << status.what();
    EXPECT_EQ(memory[0], std::byte(2));
  });
}

TEST(MailboxFailure, AReceiveFromAnySourceEndsWhenAllHaveLeft) {
  in_group("all left", 3, [&](Group& group, int rank) {
    if (rank != 0) return;
    Bytes memory(50);
    const Request request = message(kAnySource, 0, memory.data(), memory.size());
    EXPECT_EQ(receive_now(group, request).code(), Code::kPeerLeft);
  });
}

TEST(MailboxFailure, AReceiveFromAnySourceNamesFewOfManyRanksAndThoseThatLeftFirst) {
  in_group("any late", 7, [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 6) return;
    Bytes memory(50);
    const Request request = message(kAnySource, 0, memory.data(), memory.size());
    request->timeout = std::chrono::seconds(rank == 0 ? 2 : 20);
    const std::string text = receive_now(group, request).what();
    if (rank != 0) return;
    EXPECT_NE(text.find("waiting for any rank: rank 6 (pid "), std::string::npos) << text;
    EXPECT_NE(text.find("), which has left, rank 1 (pid "), std::string::npos) << text;
    EXPECT_NE(text.find(") and 2 more; this is rank 0"), std::string::npos) << text;
  });
}

TEST(MailboxFailure, AKilledSenderIsNamedWhateverItWasDoing) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  for (const bool streams : {false, true}) {
    FolderStore store;
    const auto endings = as_processes(2, [&](int rank) {
      Group group(store, options("killed", rank, 2));
      Bytes memory(200'000'000);  // more than can be moved before the kill
      const Request request = message(1 - rank, 0, memory.data(), memory.size());
      if (rank == 1) {
        if (streams) {
          group.mailbox().send(request, Runner::kCaller);
          std::thread([] {
            std::this_thread::sleep_for(milliseconds(5));
            raise(SIGKILL);
          }).detach();
          (void)group.mailbox().wait(*request);
        }
        raise(SIGKILL);
      }
      const auto began = Clock::now();
      const Status status = receive_now(group, request);
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(1));
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.what().find("rank 1 (pid"), std::string::npos) << status.what();
    });
    EXPECT_TRUE(endings[0].well());
  }
}

/// A peer sends false data: no memory out of bounds is read or written, and the receive ends.
class MalformedEnvelopes : public testing::Test {
 protected:
  MalformedEnvelopes() : group_(impostor_, options("forged", 0, 2)) {}
  ~MalformedEnvelopes() override { impostor_.leave(); }

  /// Announces a message of so many bytes, in the envelope or granted.
  void announce(uint64_t bytes, DType dtype, bool carried) {
    impostor_.pad().outbox(0).envelopes[0] = {.message = 1,
                                              .tag = 0,
                                              .bytes = bytes,
                                              .dtype = dtype,
                                              .carries_data = carried,
                                              .on_device = 0,
                                              .reserved = {},
                                              .place = 0,
                                              .reserved_too = 0,
                                              .payload = {}};
    post(1);
  }
  void post(uint64_t posted) { signal(impostor_.pad().outbox(0).posted.flag, posted); }

  /// Receives some bytes from rank 1 with a short timeout.
  Status receive(size_t bytes, DType dtype = DType::kBytes) {
    Tensor memory(bytes);
    const Request request = message(1, 0, memory.data(), bytes);
    request->dtype = dtype;
    request->timeout = milliseconds(150);
    const Status status = receive_now(group_, request);
    EXPECT_TRUE(memory.guards_are_whole());
    return status;
  }

  Impostor impostor_;
  Group group_;
};

TEST_F(MalformedEnvelopes, AnUnknownTypeIsRefused) {
  announce(8, DType(201), /*carried=*/true);
  EXPECT_FALSE(receive(8, DType::kF32).ok());
}

TEST_F(MalformedEnvelopes, MoreCarriedThanAnEnvelopeHoldsIsRefused) {
  announce(1u << 30, DType::kBytes, /*carried=*/true);
  EXPECT_FALSE(receive(2000).ok());
}

TEST_F(MalformedEnvelopes, MoreEnvelopesThanThereAreIsRefused) {
  post(1'000'000);
  EXPECT_FALSE(receive(8).ok());
  EXPECT_EQ(impostor_.peer_pad().inbox(1).taken.flag.value.load(), 0u) << "reads more than its peer can have written";
}

TEST_F(MalformedEnvelopes, AStreamFromOutsideItsMemoryIsRefused) {
  impostor_.pad().outbox(0).lease_offset = Arena::kBytes - 4096;
  impostor_.pad().outbox(0).lease_bytes = 1 << 20;
  announce(100'000, DType::kBytes, /*carried=*/false);
  signal(impostor_.pad().outbox(0).streamed.flag, 4);
  EXPECT_FALSE(receive(100'000).ok());
}

TEST_F(MalformedEnvelopes, AValidEnvelopeIsAccepted) {
  announce(8, DType::kBytes, /*carried=*/true);
  const Status status = receive(8);
  EXPECT_TRUE(status.ok()) << status.what();
}

}  // namespace
}  // namespace nvx::test
