// The launches that are refused: those in which a kernel would access memory that it must not.

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "kernel/gpu/launch_cuda.h"
#include "support/specs.h"

namespace {

thread_local size_t allocations = 0;

}  // namespace

namespace nvx::test {
namespace {

using kernel::check_launch;
using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceChannel;
using kernel::Job;
using kernel::Piece;
using kernel::Pieces;

/// A valid launch of rank 1 of three, to be spoiled.
struct Launch {
  kernel::Control control{};
  std::byte state[1]{};
  std::byte memory[256]{};
  DeviceChannel channel{{3, 2, 64, 256}, 1, state, &control};
  std::vector<Piece> table = std::vector<Piece>(6, Piece{memory, 16});
  std::vector<Job> jobs{sum(), exchange()};

  Job sum() {
    Job job;
    job.fingerprint.collective = Collective::kAllReduce, job.fingerprint.dtype = DType::kF32;
    job.algorithm = DeviceAlgorithm::kReducePackets;
    job.send = job.recv = {Pieces::Kind::kSame, 0, memory, 64};
    return job;
  }
  static Job exchange() {
    Job job;
    job.fingerprint.collective = Collective::kAllToAll;
    job.algorithm = DeviceAlgorithm::kExchangePackets;
    job.send = {Pieces::Kind::kTable, 0, nullptr, 0}, job.recv = {Pieces::Kind::kTable, 3, nullptr, 0};
    return job;
  }
  Status check() const { return check_launch(channel, jobs, table); }
};

/// Refused as the caller's mistake, with the reason.
void expect_refused(const Launch& launch, const std::string& why) {
  const Status status = launch.check();
  ASSERT_FALSE(status.ok()) << "passes: " << why;
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(status.what().rfind("nvx: ", 0), 0u) << status.what();
  EXPECT_NE(status.what().find(why), std::string::npos) << status.what();
}

template <class Spoil>
void expect_refused(Spoil spoil, const std::string& why) {
  Launch launch;
  spoil(launch);
  expect_refused(launch, why);
}

TEST(LaunchCheck, ValidLaunchIsAccepted) {
  Launch launch;
  EXPECT_TRUE(launch.check().ok());
  launch.jobs.clear(), launch.table.clear();
  EXPECT_TRUE(launch.check().ok());
}

TEST(LaunchCheck, ChannelsThatAreNone) {
  const std::string size =
      "its channel has an invalid shape: no ranks, no blocks, or a wrong size of packets or chunks";
  expect_refused([](Launch& l) { l.channel.shape.ranks = 0; }, size);
  expect_refused([](Launch& l) { l.channel.shape.blocks = 0; }, size);
  expect_refused([](Launch& l) { l.channel.shape.packets = 63; }, size);
  expect_refused([](Launch& l) { l.channel.shape.chunk_bytes = 0; }, size);
  expect_refused([](Launch& l) { l.channel.shape.chunk_bytes = 250; }, size);
  expect_refused([](Launch& l) { l.channel.rank = 3; }, "its rank is not one of the channel's ranks");
  expect_refused([](Launch& l) { l.channel.state = nullptr; }, "its channel has no memory");
  expect_refused([](Launch& l) { l.channel.control = nullptr; }, "its channel has no memory");
}

TEST(LaunchCheck, MoreThanALaunchHolds) {
  expect_refused([](Launch& l) { l.jobs.resize(kernel::kLaunchJobs + 1, l.jobs[0]); }, "too many operations");
  expect_refused([](Launch& l) { l.table.resize(kernel::kLaunchPieces + 1, l.table[0]); }, "too many pieces");
}

TEST(LaunchCheck, PiecesBehindTheTablesEnd) {
  const std::string behind = "operation 1 of a launch is refused: it lists pieces beyond the end of the table";
  expect_refused([](Launch& l) { l.table.pop_back(); }, behind);
  expect_refused([](Launch& l) { l.jobs[1].recv.index = 4; }, behind);
  expect_refused([](Launch& l) { l.jobs[1].send.index = 7; }, behind);
  expect_refused([](Launch& l) { l.jobs[1].send.index = ~uint32_t(0); }, behind);
  expect_refused([](Launch& l) { l.table.clear(); }, behind);
}

TEST(LaunchCheck, UnsupportedOperations) {
  const std::string cannot = "operation 0 of a launch is refused: its algorithm does not support its collective";
  expect_refused([](Launch& l) { l.jobs[0].algorithm = DeviceAlgorithm::kExchangeChunks; }, cannot);
  expect_refused([](Launch& l) { l.jobs[0].fingerprint.op = ReduceOp::kBxor; }, cannot);
  expect_refused([](Launch& l) { l.jobs[0].fingerprint.dtype = DType(200); }, cannot);
  expect_refused([](Launch& l) { l.jobs[0].send.bytes = l.jobs[0].recv.bytes = 4096; }, cannot);
  expect_refused([](Launch& l) { l.jobs[0].algorithm = DeviceAlgorithm(kernel::kDeviceAlgorithmCount); },
                 "its algorithm is unknown");
}

TEST(LaunchCheck, RootsThatAreNone) {
  const std::string root = "its root is not one of the channel's ranks";
  expect_refused([](Launch& l) { l.jobs[0].root = 3, l.jobs[0].fingerprint.collective = Collective::kReduce; }, root);
  expect_refused([](Launch& l) { l.jobs[0].root = -2; }, root);
  expect_refused([](Launch& l) { l.jobs[0].root = 0; }, "does not fit its collective");
  expect_refused([](Launch& l) { l.jobs[0].fingerprint.collective = Collective::kReduce; },
                 "does not fit its collective");
}

TEST(LaunchCheck, MemoryThatIsNotThere) {
  expect_refused([](Launch& l) { l.jobs[0].recv.base = nullptr; }, "it has a piece without memory");
  expect_refused([](Launch& l) { l.table[5].data = nullptr; }, "operation 1 of a launch is refused: it has a piece");
  expect_refused([](Launch& l) { l.jobs[0].recv.bytes = 60; }, "its result and its input differ in length");
  expect_refused([](Launch& l) { l.table[l.jobs[1].send.index + l.channel.rank] = {}; }, "is longer than its input");
}

TEST(LaunchCheck, MovesThatAreNone) {
  const auto with_moves = [](auto spoil) {
    return [spoil](Launch& l) {
      l.jobs[0] = {};
      l.jobs[0].algorithm = DeviceAlgorithm::kMoveOwn;
      l.jobs[0].send = {Pieces::Kind::kOwn, 0, nullptr, 2}, l.jobs[0].recv = {Pieces::Kind::kOwn, 2, nullptr, 2};
      spoil(l);
    };
  };
  Launch sound;
  with_moves([](Launch&) {})(sound);
  EXPECT_TRUE(sound.check().ok()) << sound.check().what();
  const std::string behind = "it lists pieces beyond the end", kinds = "a move needs pieces of this rank alone";
  expect_refused(with_moves([](Launch& l) { l.jobs[0].recv.index = 5; }), behind);
  expect_refused(with_moves([](Launch& l) { l.jobs[0].send.bytes = l.jobs[0].recv.bytes = 7; }), behind);
  expect_refused(with_moves([](Launch& l) { l.jobs[0].send.bytes = 1; }),
                 "different numbers of sources and destinations");
  expect_refused(with_moves([](Launch& l) { l.table[3].bytes = 8; }), "a destination of another length");
  expect_refused(with_moves([](Launch& l) { l.table[1].data = nullptr; }), "it has a piece without memory");
  expect_refused(with_moves([](Launch& l) { l.jobs[0].send.kind = Pieces::Kind::kSame; }), kinds);
  expect_refused(with_moves([](Launch& l) { l.jobs[0].algorithm = DeviceAlgorithm::kExchangeChunks; }), kinds);
  expect_refused([](Launch& l) { l.jobs[0].awaited = &l.channel.control->ended[0]; }, "its algorithm does not support");
}

TEST(LaunchCheck, AllocatesNothing) {
  const Launch launch;
  ASSERT_TRUE(launch.check().ok());  // the first call in a process chooses the instruction-set level
  const size_t before = allocations;
  const bool ok = launch.check().ok();
  EXPECT_EQ(allocations, before);
  EXPECT_TRUE(ok);
}

/// A launch of one operation has a small table, which the pieces of many ranks do not fit in.
TEST(JobOf, ListsPiecesOnlyIfTheyAreUneven) {
  constexpr uint32_t kRanks = 16;
  std::byte memory[2 * kRanks]{};
  std::vector<Piece> even, table(2 * kRanks);
  for (uint32_t p = 0; p < kRanks; ++p) even.push_back({memory + 2 * p, 2});
  const auto kind_of = [&](const std::vector<Piece>& pieces) {
    kernel::CollectiveArgs args{};
    args.call.fingerprint.collective = Collective::kAllGather, args.recv = pieces.data();
    const Job job = kernel::job_of(DeviceAlgorithm::kExchangePackets, args, 3, kRanks, 1, 0, table.data());
    for (uint32_t p = 0; p < kRanks; ++p) {
      const Piece piece = job.recv.at(p, kRanks, table.data());
      EXPECT_EQ(piece.data, pieces[p].data);
      EXPECT_EQ(piece.bytes, pieces[p].bytes);
    }
    return job.recv.kind;
  };
  EXPECT_EQ(kind_of(even), Pieces::Kind::kEven);
  std::vector<Piece> uneven = even, scattered = even;
  uneven.back().bytes = 1;
  std::swap(scattered[0], scattered[1]);
  EXPECT_EQ(kind_of(uneven), Pieces::Kind::kTable);
  EXPECT_EQ(kind_of(scattered), Pieces::Kind::kTable);
  EXPECT_EQ(kind_of(std::vector<Piece>(kRanks, {memory, 0})), Pieces::Kind::kTable);
}

}  // namespace
}  // namespace nvx::test

// Counts for AllocatesNothing. Not inlined, because gcc would take free() for a mismatched deallocation.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* const at = std::malloc(bytes)) return at;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* at) noexcept { std::free(at); }
[[gnu::noinline]] void operator delete(void* at, size_t) noexcept { std::free(at); }
