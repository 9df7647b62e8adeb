// Windows: writes to a rank that makes no call, the guarantee of a signal, and errors of a rank that waits for one.

#include "group/p2p/window.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstring>
#include <thread>

#include "support/groups.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using Request = std::shared_ptr<Message>;

/// A window of a rank over its own memory.
struct Place {
  Place(Group& group, size_t elements, uint32_t element_bytes = 1)
      : group(group), memory(elements * element_bytes), window(open(elements, element_bytes)) {}

  std::shared_ptr<Window> open(size_t elements, uint32_t element_bytes) {
    return group.open_window(Window::Memory{memory.data(), {elements, element_bytes, 7}, nullptr});
  }
  Status put(int rank, uint64_t offset, const Bytes& data) const {
    const size_t elements = data.size() / window->share(rank).element_bytes;
    return send_now(group, window->put(rank, offset, data.data(), elements), Runner::kPool);
  }
  Status signal(int rank) const { return send_now(group, window->signal(rank), Runner::kPool); }
  Status wait_signal(int rank, milliseconds timeout = milliseconds(0)) const {
    const Request request = window->wait_signal(rank);
    request->timeout = timeout;
    return receive_now(group, request, Runner::kPool);
  }

  Group& group;
  Bytes memory;
  std::shared_ptr<Window> window;
};

Bytes filled(size_t bytes, int from, int round) { return input(DType::kBytes, bytes, from, size_t(round)); }

/// Every rank writes to every rank, itself included, and signals. After the wait the data is visible.
void all_write_to_all(Group& group, size_t each, int rounds) {
  const auto ranks = size_t(group.size());
  Place place(group, each * ranks);
  for (int round = 0; round < rounds; ++round) {
    const Bytes mine = filled(each, group.rank(), round);
    for (int to = 0; to < group.size(); ++to) {
      ASSERT_TRUE(place.put(to, size_t(group.rank()) * each, mine).ok());
      ASSERT_TRUE(place.signal(to).ok());
    }
    for (int from = 0; from < group.size(); ++from) {
      const Status status = place.wait_signal(from);
      ASSERT_TRUE(status.ok()) << status.what();
      const Bytes want = filled(each, from, round);
      ASSERT_EQ(each ? std::memcmp(place.memory.data() + size_t(from) * each, want.data(), each) : 0, 0)
          << each << " bytes from rank " << from << ", round " << round;
    }
    ASSERT_TRUE(barrier(group).ok());
  }
  EXPECT_TRUE(place.window->close().ok());
}

TEST(Window, PutDataIsVisibleAfterTheSignal) {
  for (const int ranks : {1, 2, 3}) {
    in_group("all to all", ranks, [&](Group& group, int) {
      for (const size_t each : {size_t(0), size_t(1), size_t(500), size_t(70'001), as_fast(3'000'001, 300'001)})
        all_write_to_all(group, each, 4);
    });
  }
}

TEST(Window, ServesProcesses) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(3, [&](int rank) {
    Group group(store, test::options("processes", rank, 3));
    for (const size_t each : {size_t(100), size_t(1'000'001)}) all_write_to_all(group, each, 4);
  });
}

TEST(Window, ServesRanksOfOtherHosts) {
  Hosts hosts({0, 1, 0, 1});
  hosts.in_group("hosts", [&](Group& group, int) {
    for (const size_t each : {size_t(0), size_t(100), size_t(300'001)}) all_write_to_all(group, each, 3);
  });
}

/// Neither side of a write waits for a call of the other: here each writes before it looks.
TEST(Window, AWriteNeedsNothingOfItsTarget) {
  std::atomic<int> written{0};
  in_group("one-sided", 2, [&](Group& group, int rank) {
    const Bytes mine = filled(3'000'000, rank, 0);
    Place place(group, mine.size());
    ASSERT_TRUE(place.put(1 - rank, 0, mine).ok());
    ++written;
    // The other rank's write is in flight until it is signalled, and no longer.
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return written == 2; }));
    ASSERT_TRUE(place.signal(1 - rank).ok());
    ASSERT_TRUE(place.wait_signal(1 - rank).ok());
    EXPECT_TRUE(place.memory == filled(3'000'000, 1 - rank, 0));
    EXPECT_TRUE(place.window->close().ok());
  });
}

/// Signals are counted, not queued, and each is waited for once.
TEST(Window, SignalsAreCountedByPair) {
  const auto of = [](int rank) { return rank == 1 ? int(as_fast(20'000, 2'000)) : 100; };
  in_group("count", 3, [&](Group& group, int rank) {
    Place place(group, 8);
    if (rank != 0) {
      for (int i = 0; i < of(rank); ++i) ASSERT_TRUE(place.signal(0).ok());
    }
    ASSERT_TRUE(barrier(group).ok());
    if (rank == 0) {
      for (int from : {1, 2}) {
        for (int i = 0; i < of(from); ++i) ASSERT_TRUE(place.wait_signal(from).ok());
      }
      const Request more = place.window->wait_signal(1);
      group.mailbox().receive(more, Runner::kPool);
      std::this_thread::sleep_for(milliseconds(100));
      EXPECT_FALSE(more->done());
      ASSERT_TRUE(barrier(group).ok());
      EXPECT_TRUE(group.mailbox().wait(*more).ok());
    } else {
      ASSERT_TRUE(barrier(group).ok());
      if (rank == 1) {
        ASSERT_TRUE(place.signal(0).ok());
      }
    }
    EXPECT_TRUE(place.window->close().ok());
  });
}

/// Sizes, types and bounds are local to each rank.
TEST(Window, WritesStayWithinTheirTarget) {
  in_group("bounds", 2, [&](Group& group, int rank) {
    Place place(group, rank == 0 ? 3 : 10, rank == 0 ? 8 : 4);
    EXPECT_EQ(place.window->share(0).elements, 3u);
    EXPECT_EQ(place.window->share(1).element_bytes, 4u);
    EXPECT_EQ(place.window->share(1).type, 7u);
    const auto refusal = [&](int to, uint64_t offset, uint64_t elements) {
      try {
        (void)place.window->put(to, offset, place.memory.data(), elements);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kInvalid);
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_EQ(refusal(0, 2, 2),
              "nvx: put of 2 elements at offset 2 does not fit into the 3 elements that rank 0 has registered");
    EXPECT_NE(refusal(1, 11, 0), "");
    EXPECT_NE(refusal(1, UINT64_MAX, 2), "");
    EXPECT_NE(refusal(2, 0, 1), "");
    EXPECT_EQ(refusal(1, 10, 0), "");
    EXPECT_EQ(refusal(1, 9, 1), "");
    if (rank == 0) {
      ASSERT_TRUE(place.put(1, 9, Bytes(4, std::byte(5))).ok());
    }
    EXPECT_TRUE(place.window->close().ok());  // close also releases the written data
    if (rank == 1) {
      Bytes want(40);
      std::fill(want.begin() + 36, want.end(), std::byte(5));
      EXPECT_TRUE(place.memory == want);
    }
  });
}

TEST(Window, OneThatOffersNothingIsNamedAndTheGroupGoesOn) {
  in_group("nothing", 3, [&](Group& group, int rank) {
    std::byte memory{};
    const Window::Memory mine{&memory, {1, 1, 0}, nullptr};
    try {
      (void)group.open_window(rank == 1 ? std::nullopt : std::optional(mine));
      ADD_FAILURE() << "there is a window";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kInvalid);
      EXPECT_NE(std::string(error.what()).find("refused on rank 1 (pid"), std::string::npos) << error.what();
    }
    all_write_to_all(group, 10, 1);
  });
}

/// The windows of one group are independent, and a window releases its memory when it is closed.
TEST(Window, SeveralAreIndependentAndAreReleased) {
  in_group("several", 2, [&](Group& group, int rank) {
    Place first(group, 100), second(group, 100);
    auto owner = std::make_shared<const int>(0);
    const std::weak_ptr<const int> kept = owner;
    Bytes memory(10);
    auto third = group.open_window(Window::Memory{memory.data(), {10, 1, 0}, std::move(owner)});
    ASSERT_TRUE(first.signal(1 - rank).ok());
    ASSERT_TRUE(second.put(1 - rank, 0, Bytes(100, std::byte(2))).ok());
    ASSERT_TRUE(second.signal(1 - rank).ok());
    ASSERT_TRUE(second.wait_signal(1 - rank).ok());
    EXPECT_TRUE(first.memory == Bytes(100) && second.memory == Bytes(100, std::byte(2)));
    ASSERT_TRUE(first.wait_signal(1 - rank).ok());
    EXPECT_TRUE(second.window->close().ok());
    ASSERT_TRUE(first.put(1 - rank, 0, Bytes(100, std::byte(1))).ok());
    EXPECT_TRUE(first.window->close().ok());
    EXPECT_TRUE(first.memory == Bytes(100, std::byte(1)));
    EXPECT_FALSE(kept.expired());
    EXPECT_TRUE(third->close().ok());
    third.reset();
    EXPECT_TRUE(eventually(milliseconds(5'000), [&] { return kept.expired(); }));
  });
}

// --- failures

TEST(WindowFailure, AWaitThatIsTooLongNamesThePeer) {
  std::atomic<bool> over{false};
  in_group("late", 2, [&](Group& group, int rank) {
    const Place place(group, 10);
    EXPECT_TRUE(rank == 0 || eventually(milliseconds(20'000), [&] { return over.load(); }));
    if (rank == 1) return;
    const Status status = place.wait_signal(1, milliseconds(150));
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_CONTAINS(status, "wait_signal(from rank 1)");
    EXPECT_CONTAINS(status, "rank 1 (pid");
    over = true;
  });
}

TEST(WindowFailure, AKilledPeerIsNamed) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  const auto endings = as_processes(2, [&](int rank) {
    Group group(store, test::options("killed", rank, 2));
    const Place place(group, 10);
    if (rank == 1) {
      ASSERT_TRUE(place.signal(0).ok());
      raise(SIGKILL);
    }
    const Status first = place.wait_signal(1);  // the signal was sent while the peer lived
    EXPECT_TRUE(first.ok()) << first.what();
    const auto began = Clock::now();
    const Status status = place.wait_signal(1);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(1));
    ASSERT_FALSE(status.ok());
    EXPECT_CONTAINS(status, "rank 1 (pid");
    EXPECT_CONTAINS(status, "has ended");
  });
  EXPECT_TRUE(endings[0].well());
  EXPECT_EQ(endings[1].signal, SIGKILL);
}

/// Writes of a rank that left in good order are visible, even if the target was busy when it left. A rank that
/// waits for more gets an error.
void leaves_behind(const std::function<GroupOptions(int)>& options_of) {
  MemoryStore store;
  std::atomic<bool> left{false};
  as_threads(2, [&](int rank) {
    const Bytes last = filled(5'000, 1, 1);
    std::optional<Group> group(std::in_place, store, options_of(rank));
    std::optional<Place> place(std::in_place, *group, last.size());
    if (rank == 1) {
      for (int i = 0; i < 30; ++i) {
        ASSERT_TRUE(place->put(0, 0, i == 29 ? last : Bytes(100, std::byte(i))).ok());
        ASSERT_TRUE(place->signal(0).ok());
      }
      place.reset();
      const auto began = Clock::now();
      group.reset();  // its window is open, which blocks no rank
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(2));
      left = true;
      return;
    }
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return left.load(); }));
    for (int i = 0; i < 30; ++i) {
      const Status status = place->wait_signal(1);
      ASSERT_TRUE(status.ok()) << i << ": " << status.what();
    }
    EXPECT_TRUE(place->memory == last);
    const Status status = place->wait_signal(1);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.code(), Code::kPeerLeft) << status.what();
    EXPECT_CONTAINS(status, "rank 1");
  });
}

TEST(WindowFailure, PutsBeforeAPeerLeftAreVisible) {
  for (int i = 0; i < 5; ++i) leaves_behind([](int rank) { return test::options("leaves", rank, 2); });
}

TEST(WindowFailure, PutsBeforeAPeerOfAnotherHostLeftAreVisible) {
  Hosts hosts({0, 1});
  leaves_behind([&](int rank) { return hosts.options("leaves far", rank); });
}

/// Even if no rank has progressed the messages since: a message that has arrived is reported before its sender is
/// missed.
TEST(WindowFailure, UnreadPutsOfAPeerThatLeftAreVisible) {
  MemoryStore store;
  std::atomic<bool> waits{false}, left{false};
  ThreadPool::instance().limit(0);
  as_threads(2, [&](int rank) {
    std::optional<Group> group(std::in_place, store, test::options("unseen", rank, 2));
    std::optional<Place> place(std::in_place, *group, 100);
    if (rank == 1) {
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return waits.load(); }));
      ASSERT_TRUE(place->put(0, 0, Bytes(100, std::byte(4))).ok());
      ASSERT_TRUE(place->signal(0).ok());
      place.reset();
      group.reset();
      left = true;
      return;
    }
    const Request request = place->window->wait_signal(1);
    group->mailbox().receive(request, Runner::kCaller);
    waits = true;
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return left.load(); }));
    std::this_thread::sleep_for(2 * kWatchInterval);
    const Status status = group->mailbox().wait(*request);
    EXPECT_TRUE(status.ok()) << status.what();
    EXPECT_TRUE(place->memory == Bytes(100, std::byte(4)));
  });
  ThreadPool::instance().limit(SIZE_MAX);
}

/// A peer that has gone fails no rank that does not wait for it, though windows are open to it.
TEST(WindowFailure, APeerThatHasGoneIsNoFailureByItself) {
  MemoryStore store;
  std::atomic<int> left{0};
  as_threads(3, [&](int rank) {
    std::optional<Group> group(std::in_place, store, test::options("gone", rank, 3));
    std::optional<Place> place(std::in_place, *group, 100);
    if (rank == 2) {
      place.reset();
      group.reset();
      ++left;
      return;
    }
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return left == 1; }));
    std::this_thread::sleep_for(3 * kWatchInterval);
    ASSERT_TRUE(place->put(1 - rank, 0, Bytes(100, std::byte(3))).ok());
    ASSERT_TRUE(place->signal(1 - rank).ok());
    const Status status = place->wait_signal(1 - rank);
    EXPECT_TRUE(status.ok()) << status.what();
    EXPECT_TRUE(place->memory == Bytes(100, std::byte(3)));
  });
}

TEST(WindowFailure, AnAbortEndsTheWaits) {
  in_group("abort", 2, [&](Group& group, int rank) {
    const Place place(group, 10);
    std::thread aborts;
    if (rank == 1) {
      aborts = std::thread([&] {
        std::this_thread::sleep_for(milliseconds(100));
        group.abort("enough");
      });
    }
    const auto began = Clock::now();
    EXPECT_FALSE(place.wait_signal(1 - rank).ok());
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(5));
    EXPECT_FALSE(place.put(1 - rank, 0, Bytes(1)).ok());
    EXPECT_FALSE(place.window->close().ok());
    if (aborts.joinable()) aborts.join();
  });
}

/// Notes that a peer must not write: the group writes no data and fails.
TEST(WindowFailure, AMalformedNoteIsRefused) {
  struct Forged {
    uint32_t kind, unused;
    uint64_t offset, bytes;
  };
  for (const Forged& forged :
       {Forged{1, 0, 90, 11}, Forged{1, 0, UINT64_MAX, 2}, Forged{1, 0, 101, 0}, Forged{9, 0, 0, 0}}) {
    in_group("forged", 2, [&](Group& group, int rank) {
      const Place place(group, 100);
      Forged note = forged;
      if (rank == 1) {
        const Request honest = place.window->signal(0);
        group.mailbox().send(message(0, honest->tag, reinterpret_cast<std::byte*>(&note), sizeof note), Runner::kPool);
      }
      const Status status = place.wait_signal(1 - rank);
      ASSERT_FALSE(status.ok());
      EXPECT_CONTAINS(status, "writes outside the window");
      EXPECT_TRUE(place.memory == Bytes(100));
    });
  }
}

/// The error of a late receive of the user's names only the user's messages.
TEST(WindowFailure, OtherMessagesAreNotBlamed) {
  std::atomic<bool> over{false};
  in_group("other", 2, [&](Group& group, int rank) {
    const Place place(group, 10);
    if (rank == 1) {
      ASSERT_TRUE(place.signal(0).ok());
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return over.load(); }));
      return;
    }
    std::this_thread::sleep_for(milliseconds(100));
    Bytes memory(10);
    const Request request = message(1, 3, memory.data(), memory.size());
    request->timeout = milliseconds(150);
    const Status status = receive_now(group, request);
    EXPECT_EQ(status.code(), Code::kTimeout);
    EXPECT_EQ(status.what().find("it has sent"), std::string::npos) << status.what();
    over = true;
  });
}

/// If no thread can be created, writes arrive when the owner of the window waits.
TEST(WindowFailure, GoesOnWithoutThreads) {
  ThreadPool::instance().limit(0);
  in_group("no threads", 2, [&](Group& group, int) { all_write_to_all(group, 100, 2); });
  ThreadPool::instance().limit(SIZE_MAX);
}

}  // namespace
}  // namespace nvx::test
