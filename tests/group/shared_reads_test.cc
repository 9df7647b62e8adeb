// If a group has many ranks, one rank of each host reads the store for all ranks of that host.

#include <gtest/gtest.h>

#include "memory/shm/handout.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// Counts the reads of each key.
class CountingStore : public MemoryStore {
 public:
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    auto value = MemoryStore::get(key, span);
    if (!value) return value;
    std::lock_guard<std::mutex> lock(counting_);
    ++reads_[key];
    return value;
  }
  int reads(const std::string& key) {
    std::lock_guard<std::mutex> lock(counting_);
    return reads_[key];
  }

 private:
  std::mutex counting_;
  std::map<std::string, int> reads_;
};

const std::vector<int> kThreeHosts{0, 0, 0, 1, 1, 1, 2, 2};

TEST(SharedReads, AreOneAHost) {
  Hosts hosts(kThreeHosts);
  CountingStore store;
  as_threads(hosts.ranks(), [&](int rank) {
    GroupOptions options = hosts.options("shared", rank);
    options.shared_reads_from = 2;
    Group group(store, options);
    Play play{.collective = kernel::Collective::kAllReduce, .dtype = DType::kI32, .counts = {1000}};
    ASSERT_EQ(perform(group, play), "");
    ASSERT_TRUE(barrier(group).ok());
  });
  EXPECT_EQ(store.reads("nvx/1/table"), 3);
  EXPECT_EQ(store.reads("nvx/1/addresses"), 3);
}

TEST(SharedReads, SmallGroupsDoWithout) {
  CountingStore store;
  as_threads(3, [&](int rank) {
    Group group(store, options("small", rank, 3));
    ASSERT_TRUE(barrier(group).ok());
  });
  EXPECT_EQ(store.reads("nvx/1/table"), 2);
}

/// If the rank that reads for others ends or lies, the others read for themselves.
TEST(SharedReads, AReaderThatIsGoneIsDoneWithout) {
  CountingStore store;
  const std::string reader = "nvx/1/reader/" + std::to_string(describe_self(0, "host").host);
  store.add(reader + "/asked", 1);
  store.set(reader, {'n', 'o', 'b', 'o', 'd', 'y'});
  as_threads(3, [&](int rank) {
    GroupOptions o = options("gone", rank, 3);
    o.host = "host";
    o.shared_reads_from = 2;
    Group group(store, o);
    ASSERT_TRUE(barrier(group).ok());
  });
  EXPECT_EQ(store.reads("nvx/1/table"), 2);
}

TEST(Handout, GivesItsSheetsInTheirOrderAlsoToThoseWhoComeLate) {
  const std::vector<uint8_t> first(300'000, 7), second{}, third{1, 2, 3};
  Handout handout;
  Receipt early(handout.name());
  EXPECT_FALSE(early.next(milliseconds(1)));
  EXPECT_TRUE(early.open());
  handout.give(first);
  handout.give(second);
  Receipt late(handout.name());
  handout.serve();
  handout.give(third);
  for (Receipt* receipt : {&early, &late}) {
    for (const auto* sheet : {&first, &second, &third}) EXPECT_EQ(receipt->next(milliseconds(1000)), *sheet);
    EXPECT_FALSE(receipt->next(milliseconds(1)));
    EXPECT_TRUE(receipt->open());
  }
}

TEST(Handout, IsMissedWhenItIsGone) {
  auto handout = std::make_unique<Handout>();
  Receipt receipt(handout->name()), nobody("nvx-nobody");
  handout->give(std::vector<uint8_t>{5});
  handout.reset();
  EXPECT_EQ(receipt.next(milliseconds(1000)), std::vector<uint8_t>{5});
  EXPECT_FALSE(receipt.next(milliseconds(1000)));
  EXPECT_FALSE(receipt.open());
  EXPECT_FALSE(nobody.open());
}

}  // namespace
}  // namespace nvx::test
