// Moves of a rank's own pieces: when they wait for the host, what they see then, and how they end, beside operations of
// all ranks.

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <random>
#include <thread>

#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::Piece;
using kernel::Verdict;

constexpr int kRanks = 3;

/// Pieces of all alignments and many lengths, and their destinations.
struct Luggage {
  explicit Luggage(uint64_t seed) : from(4096), to(4096) {
    std::minstd_rand random(unsigned(seed) + 1);
    for (std::byte& b : from) b = std::byte(random());
    for (size_t at = 0; at < 3000;) {
      at += random() % 32;
      const size_t bytes = random() % 8 == 0 ? 0 : random() % 500;
      out.push_back({from.data() + at, bytes}), in.push_back({to.data() + at + random() % 16, bytes});
      at += bytes + 16;
    }
  }
  Job job(uint32_t index, std::vector<Piece>& table) const {
    table.resize(index + 2 * out.size());
    Job job = kernel::job_of_moves(out, in, index, table.data() + index);
    job.timeout_ns = kTimeout;
    return job;
  }
  bool has_come() const {
    for (size_t i = 0; i < out.size(); ++i) {
      if (!std::equal(out[i].data, out[i].data + out[i].bytes, in[i].data)) return false;
    }
    const size_t sum = std::accumulate(in.begin(), in.end(), size_t(0), [](size_t n, Piece p) { return n + p.bytes; });
    return size_t(std::count(to.begin(), to.end(), std::byte{})) >= to.size() - sum;  // nothing else was written
  }
  std::vector<std::byte> from, to;
  std::vector<Piece> out, in;
};

SimulatedDevices::Shape shape() { return {{kRanks, 2, 128, 256}, 3, uint32_t(-5), 0}; }

TEST(Moves, BringEveryPieceAmongOperationsOfAllRanks) {
  SimulatedDevices devices(shape());
  for (int r = 0; r < kRanks; ++r) devices.fault(r) = {.delay_us = 100, .seed = uint64_t(r)};
  as_threads(kRanks, [&](int rank) {
    for (uint64_t round = 0; round < 6; ++round) {
      // Each rank has different pieces, one rank none.
      Luggage luggage(round * 10 + uint64_t(rank));
      if (uint64_t(rank) == round % kRanks) luggage.out.clear(), luggage.in.clear();
      std::vector<Piece> table;
      const Job move = luggage.job(0, table);
      ASSERT_TRUE(kernel::check_launch(devices.channel(rank), {&move, 1}, table).ok());
      const Job again = luggage.job(uint32_t(table.size()), table);
      EXPECT_EQ(devices.launch(rank, {move, again}, table.data()), devices.lanes_in_all());
      EXPECT_TRUE(luggage.has_come()) << "round " << round;
      Batch batch(devices, rank);
      batch.add(DeviceAlgorithm::kReducePackets, spec_of(Collective::kAllReduce, 33, kRanks, round));
      batch.add(DeviceAlgorithm::kExchangeChunks, spec_of(Collective::kBroadcast, 900, kRanks, round));
      EXPECT_EQ(batch.run(), "");
    }
  });
  EXPECT_TRUE(devices.guards_are_whole());
}

/// A move copies the data that the host wrote before it raised the counter.
TEST(Moves, WaitForTheHostAndSeeWhatItHasWritten) {
  SimulatedDevices devices(shape());
  as_threads(kRanks, [&](int rank) {
    Stamp counter = 0;
    for (Stamp turn = 1; turn < 20; ++turn) {
      Luggage luggage(turn);
      const std::vector<std::byte> made = std::exchange(luggage.from, std::vector<std::byte>(4096));
      for (Piece& piece : luggage.out) piece.data = luggage.from.data() + (piece.data - made.data());
      std::vector<Piece> table;
      Job move = luggage.job(0, table);
      move.awaited = &counter, move.awaits = turn, move.timeout_ns = 0;
      std::thread host([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(300 * (turn % 3)));
        EXPECT_TRUE(std::all_of(luggage.to.begin(), luggage.to.end(), [](std::byte b) { return b == std::byte{}; }));
        luggage.from.assign(made.begin(), made.end());
        std::atomic_ref(counter).store(turn, std::memory_order_release);
      });
      EXPECT_EQ(devices.launch(rank, {move}, table.data()), devices.lanes_in_all());
      host.join();
      EXPECT_TRUE(luggage.has_come());
    }
  });
}

/// A later move does not begin either: nothing moves that the host has not permitted.
TEST(Moves, EndByTheAbortWordAndMoveNothing) {
  SimulatedDevices devices(shape());
  as_threads(kRanks, [&](int rank) {
    const Stamp counter = 0;
    Luggage luggage(uint64_t(rank) + 1);
    std::vector<Piece> table;
    Job waits = luggage.job(0, table), later = luggage.job(uint32_t(table.size()), table);
    waits.awaited = &counter, waits.awaits = 1, waits.timeout_ns = 0;
    std::thread host([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      std::atomic_ref(devices.control(rank).abort).store(1, std::memory_order_release);
    });
    EXPECT_EQ(devices.launch(rank, {waits, later}, table.data()), 0);
    EXPECT_EQ(devices.launch(rank, {later}, table.data()), 0);
    host.join();
    EXPECT_EQ(devices.control(rank).verdict.cause, Verdict::Cause::kWait);
    EXPECT_EQ(devices.control(rank).verdict.how, Waited::kAlarmed);
    EXPECT_TRUE(std::all_of(luggage.to.begin(), luggage.to.end(), [](std::byte b) { return b == std::byte{}; }));
  });
}

}  // namespace
}  // namespace nvx::test
