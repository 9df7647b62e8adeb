// Large messages of a mailbox between hosts: segments ahead of the grant, and after it.

#include "net/point_to_point.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "net/alone.h"

namespace nvx::test {
namespace {

constexpr size_t kMostSegments = 5000;  // the cost of as many exceeds what goes ahead

Bytes numbered(size_t bytes) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = std::byte(i * 7 + i / 251);
  return data;
}

size_t segments_sent(Alone& alone) {
  for (int i = 0; i < 3000; ++i) {
    alone.progress();
    EXPECT_EQ(alone.port().p2p().next_done(), nullptr);
  }
  return size_t(
      std::ranges::count_if(alone.link().sent, [](const Sent& sent) { return sent.read().kind == Kind::kSegment; }));
}

Sent segment_of(const Bytes& data, uint64_t number, uint32_t k) {
  Sent sent;
  MessageHeader header = Alone::header_of(Kind::kSegment);
  header.op = uint32_t(number);
  header.segment = k;
  append(sent.header, header);
  const auto part = std::span(data).subspan(k * kSegment);
  sent.body.assign(part.begin(), part.begin() + std::ptrdiff_t(std::min(kSegment, part.size())));
  return sent;
}

void come(Alone& alone, const Sent& message) {
  alone.link().to_come.push_back(message);
  alone.progress();
}

void come_grant(Alone& alone, uint64_t number) {
  MessageHeader header = Alone::header_of(Kind::kGrant);
  header.value = number;
  Sent grant;
  append(grant.header, header);
  come(alone, grant);
}

TEST(PointToPoint, AMessageGoesAheadOfItsGrantAndEndsAfterIt) {
  Alone alone;
  const Bytes data = numbered(10 * kSegment + 1);
  const auto owner = std::make_shared<int>();
  alone.port().p2p().send(1, 1, data.data(), data.size(), /*is_full=*/false, owner);
  EXPECT_EQ(segments_sent(alone), 11u);
  come_grant(alone, 2);
  EXPECT_EQ(alone.port().p2p().next_done(), nullptr) << "a grant of another message";
  come_grant(alone, 1);
  EXPECT_EQ(alone.port().p2p().next_done(), owner);
  come_grant(alone, 1);
  EXPECT_EQ(segments_sent(alone), 11u) << "each once";
}

TEST(PointToPoint, AFullReceiverGetsNothingAhead) {
  Alone alone;
  const Bytes data = numbered(3 * kSegment);
  const auto owner = std::make_shared<int>();
  alone.port().p2p().send(1, 1, data.data(), data.size(), /*is_full=*/true, owner);
  EXPECT_EQ(segments_sent(alone), 0u);
  come_grant(alone, 1);
  alone.progress();
  EXPECT_EQ(alone.port().p2p().next_done(), owner);
}

TEST(PointToPoint, AGrantGivesBackWhatWentAhead) {
  Alone alone;
  const Bytes data = numbered(kMostSegments * kSegment);
  alone.port().p2p().send(1, 1, data.data(), data.size(), /*is_full=*/false);
  const size_t ahead = segments_sent(alone);
  EXPECT_GT(ahead, kMostSegments / 2);
  EXPECT_LT(ahead, kMostSegments);
  alone.port().p2p().send(1, 2, data.data(), data.size(), /*is_full=*/false);
  EXPECT_EQ(segments_sent(alone), ahead) << "the first message has used all of it";
  come_grant(alone, 1);
  EXPECT_EQ(segments_sent(alone), kMostSegments);
  alone.port().p2p().send(1, 3, data.data(), data.size(), /*is_full=*/false);
  EXPECT_EQ(segments_sent(alone), kMostSegments + ahead);
}

TEST(PointToPoint, ADropReleasesSegmentsThatTheLinkHasNotRead) {
  Alone alone;
  alone.link().reads_posts = false;
  const Bytes data = numbered(20 * kSegment);
  alone.port().p2p().send(1, 1, data.data(), data.size(), /*is_full=*/false, std::make_shared<int>());
  EXPECT_EQ(alone.link().open_posts(), 8u);
  come_grant(alone, 1);
  EXPECT_EQ(segments_sent(alone), 8u) << "more follow when the link has read those";
  alone.port().mutex().held_by_caller();
  alone.port().p2p().drop();
  EXPECT_EQ(alone.link().open_posts(), 0u);
  come(alone, segment_of(data, 2, 0));
  come_grant(alone, 1);
  EXPECT_EQ(segments_sent(alone), 8u);
}

TEST(PointToPoint, SegmentsAheadOfTheGrantAreKept) {
  Alone alone;
  const Bytes data = numbered(5 * kSegment + 7);
  for (const uint32_t k : {4u, 0u, 4u, 2u}) come(alone, segment_of(data, 1, k));
  Bytes got(data.size());
  const auto owner = std::make_shared<int>();
  alone.port().p2p().grant(1, 1, got.data(), got.size(), owner);
  for (const uint32_t k : {2u, 5u, 1u, 3u}) {
    EXPECT_EQ(alone.port().p2p().next_done(), nullptr);
    come(alone, segment_of(data, 1, k));
  }
  EXPECT_EQ(alone.port().p2p().next_done(), owner);
  EXPECT_TRUE(got == data);

  for (uint32_t k = 0; k < 6; ++k) come(alone, segment_of(data, 2, k));
  std::ranges::fill(got, std::byte(0));
  alone.port().p2p().grant(1, 2, got.data(), got.size(), owner);
  EXPECT_EQ(alone.port().p2p().next_done(), owner) << "all of it had arrived";
  EXPECT_TRUE(got == data);
}

TEST(PointToPoint, ASenderThatExceedsWhatIsKeptIsDisconnected) {
  Alone alone;
  const Bytes data = numbered(kMostSegments * kSegment);
  for (uint32_t k = 0; k < kMostSegments && alone.lost_because().empty(); ++k) come(alone, segment_of(data, 1, k));
  EXPECT_NE(alone.lost_because().find("more than its credit"), std::string::npos) << alone.lost_because();
}

}  // namespace
}  // namespace nvx::test
