// Worlds of different sizes that are made one after another over one store. Ranks that join have counted fewer set-ups
// than the others and find keys of earlier set-ups.

#include <gtest/gtest.h>

#include <algorithm>
#include <latch>

#include "support/groups.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kSoon{20};  // far below the timeout of a set-up

/// Makes the worlds in turn, each with as many of the threads as it has ranks. A thread without a rank in one world
/// goes on to its next one at once, so it arrives before the others have begun that world.
void make_worlds(const std::vector<int>& sizes, Store& store) {
  const auto began = Clock::now();
  as_threads(*std::max_element(sizes.begin(), sizes.end()), [&](int rank) {
    for (const int size : sizes) {
      if (rank >= size) continue;
      Group group(store, options("world", rank, size));
      EXPECT_TRUE(barrier(group).ok()) << rank << " of " << size;
    }
  });
  EXPECT_LT(Clock::now() - began, kSoon);
}

TEST(Worlds, GrowOverOneStore) {
  MemoryStore store;
  make_worlds({2, 3}, store);
  make_worlds({5}, store);
}

TEST(Worlds, ShrinkAndGrowOverOneStore) {
  MemoryStore store;
  make_worlds({3, 2, 3}, store);
  make_worlds({4, 1, 2, 4, 3}, store);
}

/// With processes, the ranks share nothing but the store.
TEST(Worlds, GrowWithProcesses) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  FolderStore store;
  all_end_well(3, [&](int rank) {
    if (rank < 2) {
      EXPECT_TRUE(barrier(*std::make_unique<Group>(store, options("world", rank, 2))).ok());
    }
    Group group(store, options("world", rank, 3));
    EXPECT_TRUE(barrier(group).ok());
  });
}

/// The store of a rank that fails before it writes anything of its own.
class Refusing : public Store {
 public:
  explicit Refusing(Store& all) : all_(all) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key == "nvx/1/2") throw Error(Code::kSystem, "nvx: refused");
    all_.set(key, value);
  }
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    return all_.get(key, span);
  }
  int64_t add(const std::string& key, int64_t n) override { return all_.add(key, n); }
  void remove(const std::string& key) override { all_.remove(key); }

 private:
  Store& all_;
};

/// The first set-up of this rank is the second one of the others.
TEST(Worlds, JoiningRankThatFailsIsNamedOnTheOthers) {
  MemoryStore store;
  make_worlds({2}, store);
  const auto began = Clock::now();
  as_threads(3, [&](int rank) {
    const GroupOptions own = options("grown", rank, 3);
    // The rank fails after the others have begun: earlier, the failure could not be attributed to this set-up.
    EXPECT_TRUE(rank != 2 || eventually(kSoon, [&] { return store.add("nvx/generation/0", 0) == 2; }));
    Refusing refusing(store);
    const std::string error = set_up_error(rank == 2 ? static_cast<Store&>(refusing) : store, own);
    EXPECT_NE(error.find("refused"), std::string::npos) << error;
    EXPECT_TRUE(rank == 2 || error.find("rank 2 (pid") != std::string::npos) << error;
  });
  EXPECT_LT(Clock::now() - began, kSoon);
}

/// If the world sizes truly differ, no rank begins another set-up: the rank that notices reports it soon.
TEST(Worlds, OfDifferentSizesAreRefusedSoon) {
  MemoryStore store;
  std::latch made(2);
  const auto began = Clock::now();
  as_threads(3, [&](int rank) {
    if (rank < 2) {
      Group group(store, options("small", rank, 2));
      made.arrive_and_wait();
      return;
    }
    made.wait();
    const std::string error = set_up_error(store, options("small", rank, 3));
    EXPECT_NE(error.find(") creates this group with 2 ranks, this rank with 3"), std::string::npos) << error;
  });
  EXPECT_LT(Clock::now() - began, kSoon);
}

}  // namespace
}  // namespace nvx::test
