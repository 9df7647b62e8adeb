// Cutting of large operations: the chunks give the bits of the whole, on any hosts.

#include "group/plan/chunks.h"

#include <gtest/gtest.h>

#include "support/hosts.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::Collective;

PlanFacts on(size_t hosts, size_t rails = 1) { return {.ranks = rails, .hosts = hosts, .rails = rails}; }

Operation operation(Collective collective, size_t pieces, size_t longest) {
  Operation o;
  o.collective = collective;
  o.dtype = DType::kF32;
  o.count = pieces * longest / 4;
  o.send = Pieces(collective == Collective::kReduceScatter ? pieces : 0);
  o.recv = Pieces(collective == Collective::kAllGather || collective == Collective::kBroadcast ? pieces : 0);
  for (Pieces* list : {&o.send, &o.recv}) {
    for (size_t p = 0; p < list->size(); ++p) (*list)[p].bytes = longest;
  }
  if (collective == Collective::kBroadcast) o.count = longest / 4;
  return o;
}

struct ExpectedCut {
  Collective collective;
  size_t pieces, longest;
  PlanFacts facts;
  size_t slice, chunks;
};

// Between hosts: 8 messages of 63 KiB a host and rail. The order of a sum depends on the position.
constexpr size_t kSlice = 504 * K;

TEST(Chunks, AreEvenAndEndWhereSchedulesBegin) {
  const ExpectedCut kCuts[] = {
      {Collective::kAllReduce, 1, 4 * M + 4, on(1), 2 * M + 64, 2},
      {Collective::kAllReduce, 1, 64 * M, on(1), 4 * M, 16},
      {Collective::kAllReduce, 1, 64 * M, on(1, 8), 4 * M, 16},
      {Collective::kAllReduce, 1, 64 * M, on(2), 4 * 2 * kSlice + 2 * kSlice, 14},
      {Collective::kAllReduce, 1, 64 * M, on(3, 8), 24 * kSlice, 6},
      {Collective::kReduce, 1, 64 * M, on(3), 4 * M, 16},
      {Collective::kBroadcast, 4, 64 * M, on(3), 4 * M, 16},
      {Collective::kAllGather, 4, 4 * M, on(3), 1 * M, 4},
      {Collective::kReduceScatter, 4, 4 * M, on(1), 1 * M, 4},
      {Collective::kReduceScatter, 4, 4 * M, on(3), 3 * kSlice, 3},
      {Collective::kReduceScatter, 64, 1 * M, on(1), 64 * K, 16},
  };
  for (const ExpectedCut& e : kCuts) {
    const Cut c = cut(operation(e.collective, e.pieces, e.longest), e.facts);
    const std::string what = std::string(name(e.collective)) + " of " + std::to_string(e.longest) + " on " +
                             std::to_string(e.facts.hosts) + " hosts";
    EXPECT_EQ(c.slice, e.slice) << what;
    EXPECT_EQ(c.chunks, e.chunks) << what;
    size_t total = 0;
    for (size_t k = 0; k < c.chunks; ++k) {
      const kernel::Piece part = c.of({nullptr, e.longest}, k);
      EXPECT_NE(part.bytes, 0u);
      total += part.bytes;
    }
    EXPECT_EQ(total, e.longest) << what;
    EXPECT_EQ(c.of({nullptr, 5}, c.chunks).bytes, 0u);
  }
}

TEST(Chunks, DependOnlyOnFactsThatAllRanksShare) {
  EXPECT_FALSE(goes_in_chunks(Collective::kAllReduce, DType::kF32, kChunk / 4));
  EXPECT_TRUE(goes_in_chunks(Collective::kAllReduce, DType::kF32, kChunk / 4 + 1));
  EXPECT_TRUE(goes_in_chunks(Collective::kBroadcast, DType::kBool, kChunk + 1));
  EXPECT_FALSE(goes_in_chunks(Collective::kBroadcast, DType::kBytes, 100 * kChunk));
  EXPECT_FALSE(goes_in_chunks(Collective::kAllToAll, DType::kF32, 100 * kChunk));
  EXPECT_FALSE(goes_in_chunks(Collective::kGather, DType::kF32, 100 * kChunk));
}

/// Sums floats in chunks of this many bytes.
Bytes in_chunks(Group& group, const Operation& o, size_t slice, std::chrono::milliseconds span) {
  const size_t bytes = o.count * size_of(o.dtype);
  Bytes out(bytes);
  const Whole whole{o.fingerprint(), Deadline::after(span), bytes};
  for (size_t at = 0; at < bytes; at += slice) {
    Operation part;
    part.collective = o.collective, part.dtype = o.dtype, part.root = o.root;
    part.in = o.in + at, part.out = out.data() + at;
    part.count = std::min(slice, bytes - at) / size_of(o.dtype);
    part.whole = &whole;
    EXPECT_TRUE(group.execute(part).ok());
  }
  return out;
}

TEST(Chunks, GiveTheBitsOfTheWholeOnSeveralHosts) {
  if (why_no_processes()) GTEST_SKIP() << "megabytes take minutes here";
  Hosts hosts({0, 1, 2, 0, 1});
  MemoryStore store;
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("chunks", rank));
    const size_t count = (5 * M + 4 * K) / 4;  // so that the remainder would be planned as a small operation
    const Bytes in = input(DType::kF32, count, rank, 1);
    for (const Collective collective : {Collective::kAllReduce, Collective::kReduce}) {
      Bytes whole(in.size());
      Operation o = operation(collective, 1, in.size());
      if (collective == Collective::kReduce) o.root = 2;
      o.in = in.data(), o.out = whole.data();
      ASSERT_TRUE(group.execute(o).ok());
      const Cut c = cut(o, group.plan_facts());
      ASSERT_GT(c.chunks, 1u);
      const Bytes same = in_chunks(group, o, c.slice, std::chrono::seconds(60));
      const Bytes other = in_chunks(group, o, c.slice / 3 / 64 * 64, std::chrono::seconds(60));
      if (o.root >= 0 && o.root != rank) continue;
      EXPECT_TRUE(same == whole) << name(collective);
      EXPECT_EQ(other == whole, collective == Collective::kReduce) << "where it is cut matters to a ring alone";
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// Each chunk alone would have had enough time.
TEST(Chunks, ShareTheTimeOfTheWhole) {
  MemoryStore store;
  as_threads(2, [&](int rank) {
    Group group(store, options("time", rank, 2));
    Bytes data(64);
    Operation o = operation(Collective::kAllReduce, 1, 128);
    const Whole whole{o.fingerprint(), Deadline::after(std::chrono::milliseconds(300)), 128};
    Status status;
    for (int k = 0; k < 100 && status.ok(); ++k) {
      Operation part;
      part.collective = Collective::kAllReduce, part.dtype = DType::kF32, part.count = 16;
      part.in = part.out = data.data();
      part.whole = &whole;
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      status = group.execute(part);
    }
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.what().find("32 elements"), std::string::npos) << "as the user called it: " << status.what();
  });
}

}  // namespace
}  // namespace nvx::test
