// Messages between ranks of different hosts.

#include <gtest/gtest.h>

#include "group/p2p/mailbox.h"
#include "support/groups.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

/// A message to another host leaves at once up to a limit; a longer one waits for its receive.
TEST(InterHostPeer, AShortMessageToAnotherHostDoesNotWaitForItsReceive) {
  constexpr size_t kEager = net::PointToPoint::kMostEager, kCopied = net::Messenger::kMostCopied;
  Hosts hosts({0, 1});
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, hosts.options("eager", rank));
    for (const size_t bytes : {size_t(0), kCopied, kCopied + 1, kEager, kEager + 1}) {
      Bytes out = input(DType::kBytes, bytes, 1, bytes), in(bytes);
      const std::shared_ptr<Message> request = message(1 - rank, 0, rank == 1 ? out.data() : in.data(), bytes);
      if (rank == 1) {
        group.mailbox().send(request, Runner::kPool);
        if (bytes <= kEager) {
          EXPECT_TRUE(group.mailbox().wait(*request).ok());
        }
        ASSERT_TRUE(barrier(group).ok());
        EXPECT_EQ(request->done(), bytes <= kEager) << bytes;
        if (request->done()) std::ranges::fill(out, decltype(out)::value_type(0xA5));  // nothing reads it any more
        ASSERT_TRUE(barrier(group).ok());
        EXPECT_TRUE(group.mailbox().wait(*request).ok());
      } else {
        ASSERT_TRUE(barrier(group).ok());
        ASSERT_TRUE(barrier(group).ok());
        EXPECT_TRUE(receive_now(group, request).ok());
        EXPECT_TRUE(in == input(DType::kBytes, bytes, 1, bytes)) << bytes;
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

}  // namespace
}  // namespace nvx::test
