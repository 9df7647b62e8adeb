// How sends and receives match.

#include "group/p2p/mailbox.h"

#include <gtest/gtest.h>

#include "support/groups.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using Request = std::shared_ptr<Message>;

/// Within a pair and tag, messages match in order; across tags in any order.
TEST(Matching, TagsMatchInAnyOrderAndEachInOrder) {
  in_group("tags", 2, [&](Group& group, int rank) {
    constexpr size_t kEach = 40, kTags = 3;
    const auto bytes_of = [](size_t n) { return n % 4 == 0 ? size_t(20'000) : size_t(16); };
    std::vector<Bytes> memory;
    std::vector<Request> requests;
    for (size_t i = 0; i < kEach * kTags; ++i) {
      // The sender goes through the tags in turn. The receiver takes all messages of the last tag first.
      const size_t tag = rank == 0 ? i % kTags : kTags - 1 - i / kEach;
      const size_t n = (rank == 0 ? i / kTags : i % kEach) * kTags + tag;
      memory.push_back(rank == 0 ? input(DType::kBytes, bytes_of(n), 0, n) : Bytes(bytes_of(n)));
      requests.push_back(message(1 - rank, int64_t(tag), memory.back().data(), memory.back().size()));
    }
    for (const Request& request : requests) {
      rank == 0 ? group.mailbox().send(request, Runner::kPool) : group.mailbox().receive(request, Runner::kPool);
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_TRUE(group.mailbox().wait(*requests[i]).ok());
      if (rank == 0) continue;
      const size_t n = i % kEach * kTags + (kTags - 1 - i / kEach);
      ASSERT_TRUE(memory[i] == input(DType::kBytes, bytes_of(n), 0, n)) << i;
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// A match does not search through messages of other tags.
TEST(Matching, ManyTagsInReverseMatchSoon) {
  in_group("reverse", 2, [&](Group& group, int rank) {
    const int64_t kMany = int64_t(as_fast(20'000, 2'000));
    std::vector<int64_t> values(size_t(kMany), 0);
    std::vector<Request> requests;
    const auto began = Clock::now();
    for (int64_t i = 0; i < kMany; ++i) {
      const int64_t tag = rank == 0 ? i : kMany - 1 - i;
      if (rank == 1) values[size_t(i)] = tag;
      requests.push_back(message(1 - rank, tag, reinterpret_cast<std::byte*>(&values[size_t(i)]), sizeof(int64_t)));
      rank == 1 ? group.mailbox().send(requests.back(), Runner::kPool)
                : group.mailbox().receive(requests.back(), Runner::kPool);
    }
    for (const Request& request : requests) ASSERT_TRUE(group.mailbox().wait(*request).ok());
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
    for (int64_t i = 0; i < kMany; ++i) ASSERT_EQ(values[size_t(i)], rank == 0 ? i : kMany - 1 - i);
    ASSERT_TRUE(barrier(group).ok());
  });
}

}  // namespace
}  // namespace nvx::test
