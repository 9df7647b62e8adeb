// Sends and receives with the device algorithms: two ranks, and one channel per direction.

#include <gtest/gtest.h>

#include "support/pushes.h"
#include "support/ranks.h"
#include "support/ways.h"

namespace nvx::test {
namespace {

using kernel::DeviceVerdict;
using kernel::Piece;
using kernel::Verdict;

const Twins::Shape kShape{{2, 2, 128, 256}, 2, uint32_t(-11), Stamp(0) - 9};  // packets hold 2 KiB

/// The properties of a message.
struct Message {
  uint32_t from;
  size_t elements;
  uint64_t round;
  DType dtype = DType::kU8;

  Bytes content() const { return input(dtype, elements, int(from), round); }
  size_t shift() const { return round % 3 == 0 ? 0 : round % 16; }
  DeviceAlgorithm algorithm() const {
    return elements * size_of(dtype) > 2048 || round % 2 == 0 ? DeviceAlgorithm::kExchangeChunks
                                                              : DeviceAlgorithm::kExchangePackets;
  }
};

class Pair {
 public:
  /// Runs one kernel of the rank on the channel of that direction. Returns whether it succeeded.
  bool run(uint32_t rank, uint32_t from, Job job, uint64_t patience_ns) {
    job.patience_ns = patience_ns;
    Twins& way = ways_[from];
    const Status may = kernel::check_launch(way.channel(int(rank)), {&job, 1}, {});
    EXPECT_TRUE(may.ok()) << may.what();
    return may.ok() && way.launch(int(rank), {job}, nullptr) == way.lanes_in_all();
  }

  void send(const Message& m) {
    Tensor tensor(m.content(), m.shift());
    EXPECT_TRUE(run(m.from, m.from, kernel::job_of_send(m.algorithm(), {tensor.data(), tensor.size()}, m.dtype, m.from),
                    kPatience));
    EXPECT_TRUE(tensor.guards_are_whole() && tensor.holds(m.content()));
  }
  void receive(const Message& m) {
    const Bytes want = m.content();
    Tensor tensor(want.size(), (m.shift() + 5) % 16);
    const Job job = kernel::job_of_recv(m.algorithm(), {tensor.data(), tensor.size()}, m.dtype, 1 - m.from);
    EXPECT_TRUE(run(1 - m.from, m.from, job, kPatience));
    EXPECT_TRUE(tensor.holds(want)) << want.size() << " bytes from rank " << m.from;
    EXPECT_TRUE(tensor.guards_are_whole()) << want.size() << " bytes from rank " << m.from;
  }
  const DeviceVerdict& verdict(uint32_t rank, uint32_t from) { return ways_[from].control(int(rank)).verdict; }
  bool guards_are_whole() const { return ways_[0].guards_are_whole() && ways_[1].guards_are_whole(); }
  void dawdle(uint32_t rank) {
    for (Twins& way : ways_) way.mischief(int(rank)) = {Mischief::Kind::kNone, 200, rank};
  }

 private:
  Twins ways_[2] = {Twins(kShape), Twins(kShape)};
};

/// From empty to several times the capacity of the slots, with and without packets.
std::vector<Message> messages(uint32_t from) {
  std::vector<Message> list;
  for (const size_t n : {0, 1, 3, 16, 17, 255, 256, 257, 511, 513, 1000, 2048, 2049, 5000, 9001}) {
    for (const DType dtype : {DType::kU8, DType::kC128}) list.push_back({from, n, list.size() + 40 * from, dtype});
  }
  return list;
}

/// Each direction on its own stream, so that both ranks can send more than any buffer at once.
TEST(Messages, GoBothWaysAtOnce) {
  Pair pair;
  pair.dawdle(1);
  as_threads(4, [&](int i) {
    const uint32_t rank = uint32_t(i % 2), from = uint32_t(i / 2);
    for (const Message& m : messages(from)) rank == from ? pair.send(m) : pair.receive(m);
  });
  EXPECT_TRUE(pair.guards_are_whole());
}

/// In turns, on one stream.
TEST(Messages, GoToAndFro) {
  Pair pair;
  as_threads(2, [&](int i) {
    const uint32_t rank = uint32_t(i);
    const std::vector<Message> ping = messages(0), pong = messages(1);
    for (size_t k = 0; k < ping.size(); ++k) {
      rank == 0 ? pair.send(ping[k]) : pair.receive(ping[k]);
      rank == 1 ? pair.send(pong[k]) : pair.receive(pong[k]);
    }
  });
  EXPECT_TRUE(pair.guards_are_whole());
}

/// A small message is sent before it is received.
TEST(Messages, ASmallOneNeedsNoReceiverToBeSent) {
  Pair pair;
  for (uint64_t round : {1, 3}) pair.send({0, 100, round});
  for (uint64_t round : {1, 3}) pair.receive({0, 100, round});
}

/// Differing lengths and types are reported on both sides: by the receiver at once, by the sender when it needs space.
TEST(Messages, WhatDoesNotMatchIsNamed) {
  struct Row {
    size_t sent, due;
    DType sent_as, due_as;
    bool sender_learns;
  };
  const Row rows[] = {{40, 39, DType::kF32, DType::kF32, false},
                      {0, 1, DType::kU8, DType::kU8, false},
                      {40, 40, DType::kF32, DType::kI32, false},
                      {4000, 3999, DType::kU8, DType::kU8, true},
                      {4000, 0, DType::kU8, DType::kU8, true}};
  for (const Row& row : rows) {
    Pair pair;
    as_threads(2, [&](int i) {
      const bool sends = i == 0;
      const DType dtype = sends ? row.sent_as : row.due_as;
      Tensor tensor((sends ? row.sent : row.due) * size_of(dtype));
      const Piece piece{tensor.data(), tensor.size()};
      const Job job = sends ? kernel::job_of_send(DeviceAlgorithm::kExchangeChunks, piece, dtype, 0)
                            : kernel::job_of_recv(DeviceAlgorithm::kExchangeChunks, piece, dtype, 1);
      EXPECT_EQ(pair.run(uint32_t(i), 0, job, 5000 * kMillisecond), sends && !row.sender_learns);
      if (sends && !row.sender_learns) return;
      const DeviceVerdict& v = pair.verdict(uint32_t(i), 0);
      EXPECT_EQ(v.cause, Verdict::Cause::kMismatch);
      EXPECT_EQ(v.peer, 1 - i);
      EXPECT_EQ(v.mine[kernel::kCountWord], sends ? row.sent : row.due);
      EXPECT_EQ(v.theirs[kernel::kCountWord], sends ? row.due : row.sent);
    });
  }
}

TEST(Messages, ASenderThatDoesNotComeIsNamed) {
  Pair pair;
  Tensor tensor(100);
  const Job job = kernel::job_of_recv(DeviceAlgorithm::kExchangePackets, {tensor.data(), tensor.size()}, DType::kU8, 1);
  EXPECT_FALSE(pair.run(1, 0, job, 50 * kMillisecond));
  EXPECT_EQ(pair.verdict(1, 0).how, Waited::kTimedOut);
  EXPECT_EQ(pair.verdict(1, 0).peer, 0);
}

}  // namespace
}  // namespace nvx::test
