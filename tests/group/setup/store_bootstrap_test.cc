// Ranks exchange through the store the data that they need to share GPU memory.

#include "group/setup/store_bootstrap.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"
#include "support/gpu_processes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

StoreBootstrap::Options bootstrap_options(int rank, int ranks, milliseconds timeout = milliseconds(60'000)) {
  return {.prefix = "here", .rank = rank, .ranks = ranks, .timeout = timeout};
}

std::vector<std::byte> speech(int rank, int round) {
  return std::vector<std::byte>(size_t(rank * 1000 + round) % 3001, std::byte(16 * rank + round));
}

void exchange(Store& store, int rank, int ranks, int rounds) {
  StoreBootstrap bootstrap(store, bootstrap_options(rank, ranks));
  for (int round = 0; round < rounds; ++round) {
    const auto received = bootstrap.all_gather(speech(rank, round));
    ASSERT_EQ(received.size(), size_t(ranks));
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(received[size_t(r)], speech(r, round)) << rank << r;
  }
}

/// The error with which a rank ended that was to receive from all; nothing if it succeeded.
std::optional<Error> failure_of(Bootstrap& bootstrap) {
  try {
    (void)bootstrap.all_gather({});
    return {};
  } catch (const Error& error) {
    return error;
  }
}

TEST(StoreBootstrap, EachRankGetsTheValuesOfAll) {
  for (const int ranks : {1, 2, 5}) {
    MemoryStore store;
    as_threads(ranks, [&](int rank) { exchange(store, rank, ranks, 6); });
    EXPECT_EQ(store.keys().size(), size_t(ranks) + 1) << "the values of the last round, and its table";
  }
}

TEST(StoreBootstrap, ProcessesGetTheValuesOfAll) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(3, [&](int rank) { exchange(store, rank, 3, 4); });
}

TEST(StoreBootstrap, AbsentRanksAreNamed) {
  MemoryStore store;
  as_threads(4, [&](int rank) {
    if (rank >= 2) return;
    StoreBootstrap bootstrap(store, bootstrap_options(rank, 4, milliseconds(300)));
    const auto failure = failure_of(bootstrap);
    ASSERT_TRUE(failure);
    EXPECT_TRUE(failure->code() == Code::kTimeout || failure->code() == Code::kPeerFailed);
    EXPECT_NE(std::string(failure->what()).find("rank 2, rank 3 did not join within"), std::string::npos)
        << failure->what();
  });
}

TEST(StoreBootstrap, WhereTheFirstRankIsMissingTheOthersReportIt) {
  MemoryStore store;
  as_threads(3, [&](int rank) {
    if (rank == 0) return;
    StoreBootstrap bootstrap(store, bootstrap_options(rank, 3, milliseconds(300)));
    const auto failure = failure_of(bootstrap);
    ASSERT_TRUE(failure);
    EXPECT_NE(std::string(failure->what()).find("rank 0 did not join"), std::string::npos) << failure->what();
  });
}

TEST(StoreBootstrap, GivingUpEndsTheOthersWaits) {
  for (const int quitter : {0, 2}) {
    MemoryStore store;
    as_threads(3, [&](int rank) {
      StoreBootstrap bootstrap(store, bootstrap_options(rank, 3));
      const auto began = Clock::now();
      if (rank == quitter) return bootstrap.give_up({Code::kSystem, "there is no GPU"});
      const auto failure = failure_of(bootstrap);
      ASSERT_TRUE(failure);
      EXPECT_EQ(failure->code(), Code::kPeerFailed);
      EXPECT_EQ(std::string(failure->what()), "nvx: rank " + std::to_string(quitter) +
                                                  " failed: there is no GPU; this is rank " + std::to_string(rank));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
    });
  }
}

TEST(StoreBootstrap, WatchCanEndAWait) {
  MemoryStore store;
  auto watched = bootstrap_options(1, 2);
  watched.watch = [](int rank) { throw Error(Code::kPeerDied, "nvx: rank " + std::to_string(rank) + " has ended"); };
  StoreBootstrap bootstrap(store, watched);
  const auto failure = failure_of(bootstrap);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code(), Code::kPeerDied);
  EXPECT_STREQ(failure->what(), "nvx: rank 0 has ended");
}

/// A store that corrupts the value of one key.
class FalseStore : public MemoryStore {
 public:
  FalseStore(std::string key, std::function<void(std::vector<uint8_t>&)> spoil)
      : key_(std::move(key)), spoil_(std::move(spoil)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::vector<uint8_t> written = value;
    if (key == key_) spoil_(written);
    MemoryStore::set(key, written);
  }

 private:
  const std::string key_;
  const std::function<void(std::vector<uint8_t>&)> spoil_;
};

TEST(StoreBootstrap, GarbageIsNotBelieved) {
  using Value = std::vector<uint8_t>;
  const std::pair<const char*, std::function<void(Value&)>> kSpoils[] = {
      {"nothing", [](Value& value) { value.clear(); }},
      {"too short for a header", [](Value& value) { value.resize(31); }},
      {"shorter than it says", [](Value& value) { value.pop_back(); }},
      {"longer than it says", [](Value& value) { value.push_back(0); }},
      {"no magic", [](Value& value) { value[0] ^= 1; }},
      {"another version", [](Value& value) { value[4] ^= 2; }},
      {"another header", [](Value& value) { value[6] ^= 8; }},
      {"another rank", [](Value& value) { value[8] ^= 4; }},
      {"another round", [](Value& value) { value[12] ^= 1; }},
      {"more than there can be", [](Value& value) { value[31] = 0xff; }},
  };
  for (const auto& [name, spoil] : kSpoils) {
    for (const char* key : {"here/0/1", "here/0/table"}) {
      FalseStore store(key, spoil);
      const bool table = std::strcmp(key, "here/0/table") == 0;
      as_threads(3, [&, name = name](int rank) {
        StoreBootstrap bootstrap(store, bootstrap_options(rank, 3));
        std::string text;
        try {
          (void)bootstrap.all_gather(speech(rank, 3));
        } catch (const Error& error) {
          text = error.what();
        }
        const bool fooled = table && rank == 0;  // rank 0 wrote the table and does not read it
        EXPECT_EQ(text.empty(), fooled) << name << ": " << text;
        if (!fooled && !table) {
          EXPECT_NE(text.find("the message of rank 1 in the store"), std::string::npos) << name << ": " << text;
        }
      });
    }
  }
}

TEST(StoreBootstrap, ATableOfOtherRanksIsNotTaken) {
  MemoryStore store;
  as_threads(2, [&](int rank) { exchange(store, rank, 2, 1); });
  StoreBootstrap late(store, bootstrap_options(1, 2));  // the same prefix a second time
  const auto failure = failure_of(late);
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->code(), Code::kMismatch);
}

TEST(StoreBootstrap, RanksOfOneProcessShareTheirGpusOverIt) {
  MemoryStore store;
  Process process(2);
  as_threads(2, [&](int rank) {
    StoreBootstrap bootstrap(store, bootstrap_options(rank, 2));
    const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
    EXPECT_EQ(mappings.agreement().kind, ShareKind::kPointer);
    write_and_look(mappings, bootstrap, rank, 2);
  });
}

TEST(StoreBootstrap, ProcessesShareTheirGpusOverIt) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(3, [&](int rank) {
    Process process(3);
    if (rank == 1) process.driver->lacks(ShareKind::kFabric);
    StoreBootstrap bootstrap(store, bootstrap_options(rank, 3));
    const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 3, rank));
    EXPECT_EQ(mappings.agreement().kind, ShareKind::kFd);
    write_and_look(mappings, bootstrap, rank, 3);
  });
}

/// A rank fails without the others' knowledge: it reports that, and they do not wait until their timeout.
TEST(StoreBootstrap, AShareThatOneRankCannotMakeEndsOnAll) {
  MemoryStore store;
  as_threads(3, [&](int rank) {
    Process process(3);
    StoreBootstrap bootstrap(store, bootstrap_options(rank, 3));
    FalseBootstrap breaking(bootstrap, [&](int round, std::vector<std::byte>&) {
      if (rank == 1 && round == 2) throw std::runtime_error("out of memory, as a test wants it");
    });
    const auto began = Clock::now();
    try {
      const PeerMappings mappings(*process.registry, breaking, options_of(rank, 3, rank));
      ADD_FAILURE();
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find("out of memory, as a test wants it"), std::string::npos) << error.what();
      EXPECT_EQ(std::string(error.what()).find("rank 1 failed") != std::string::npos, rank != 1) << error.what();
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(30));
  });
}

}  // namespace
}  // namespace nvx::test
