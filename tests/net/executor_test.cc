// Every schedule of the catalog over links that are slow, reorder messages, and cut them into small segments; and
// several runs at once.

#include "net/executor.h"

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>

#include "support/ranks.h"
#include "support/schedule_runs.h"

namespace nvx::test {
namespace {

using net::Progress;
using schedule::Collective;
using schedule::Row;

/// The conditions of a network that keeps its contract.
struct NetworkConditions {
  const char* name;
  net::LoopbackNet::Options options;
};

NetworkConditions conditions(const char* name, size_t segment, size_t place_above, int delay, double reorder) {
  NetworkConditions c{name, {}};
  c.options.seed = 11;
  c.options.segment_bytes = segment;
  c.options.place_above = place_above;
  c.options.faults.most_delay = delay;
  c.options.faults.reorder = reorder;
  return c;
}

const NetworkConditions kConditions[] = {
    conditions("in_order", 64 << 10, 64 << 10, 0, 0),
    conditions("small_segments", 32, 1 << 20, 0, 0),
    conditions("fetched", 48, 0, 0, 0),
    conditions("reordered", 32, 1 << 20, 6, 0.4),
    conditions("reordered_and_fetched", 32, 20, 6, 0.4),
};
void PrintTo(const NetworkConditions& c, std::ostream* out) { *out << c.name; }

/// Advances a run on all ranks in turn on this thread, until it ends. Returns what went wrong, or an empty text.
class RoundRobin {
 public:
  explicit RoundRobin(Messengers& wires) : messenger_(wires), ports_(wires.ports(/*group=*/77)) {
    for (int r = 0; r < wires.ranks(); ++r) locks_.push_back(std::make_unique<MutexLock>(wires.messenger(r).mutex()));
    for (const auto& port : ports_) {
      port->mutex().held_by_caller();
      port->end_operation(op_ + 1);
    }
  }
  ~RoundRobin() { locks_.clear(); }

  std::string run(const Row& row, const Shape& shape, Memory memory, int window) {
    ++op_;
    std::vector<std::unique_ptr<Part>> parts;
    std::vector<std::unique_ptr<net::ScheduleRun>> runs;
    for (int r = 0; r < shape.size; ++r) {
      parts.push_back(std::make_unique<Part>(shape, r, memory, op_));
      // Some ranks begin after others have sent.
      if (op_ % 3 == 0) turn(runs);
      runs.push_back(std::make_unique<net::ScheduleRun>(*ports_[size_t(r)], parts.back()->args(row, op_, window)));
    }
    for (int turns = 0; !turn(runs); ++turns) {
      if (turns > 100'000) return "does not end";
    }
    for (int r = 0; r < shape.size; ++r) {
      if (runs[size_t(r)]->verdict().cause != net::ScheduleRun::Verdict::Cause::kNone) return "has failed";
      if (!runs[size_t(r)]->waits_for().empty()) return "waits for a rank though it is done";
      if (const std::string wrong = parts[size_t(r)]->verdict(); !wrong.empty()) return wrong;
    }
    runs.clear();
    for (const auto& port : ports_) {
      port->mutex().held_by_caller();
      port->end_operation(op_ + 1);
      if (port->calls().take_late()) return "something is left over";
    }
    return "";
  }

 private:
  /// Advances all runs once; true if all are done.
  bool turn(std::vector<std::unique_ptr<net::ScheduleRun>>& runs) {
    bool all = true;
    for (size_t r = 0; r < runs.size(); ++r) {
      net::Messenger& messenger = messenger_.messenger(int(r));
      messenger.mutex().held_by_caller();
      messenger.progress();
      all &= runs[r]->advance() == Progress::kDone;
    }
    return all;
  }

  Messengers& messenger_;
  std::vector<std::unique_ptr<net::GroupPort>> ports_;
  std::vector<std::unique_ptr<MutexLock>> locks_;  // no other thread drives the links
  uint32_t op_ = uint32_t(-5);                     // the numbers wrap
};

class Schedules : public testing::TestWithParam<NetworkConditions> {};
INSTANTIATE_TEST_SUITE_P(NetworkConditions, Schedules, testing::ValuesIn(kConditions),
                         [](const auto& info) { return info.param.name; });

TEST_P(Schedules, GiveTheExpectedResults) {
  for (int ranks = 1; ranks <= int(as_fast(8, 6)); ++ranks) {
    Messengers wires(ranks, GetParam().options);
    RoundRobin together(wires);
    uint64_t seed = 0;
    for (const Row& row : schedule::catalog()) {
      for (const size_t elements : {size_t(0), size_t(ranks) - 1, size_t(ranks), size_t(ranks) * 37 + 5}) {
        for (const Blocks blocks : {Blocks::kEqual, Blocks::kNearly, Blocks::kLoose}) {
          const ShapeRequest request{row.collective, ranks, elements, 4, int(++seed % uint64_t(ranks)), blocks, seed};
          const Shape shape = shape_of(request);
          if (!legal(row, shape) || (blocks != Blocks::kEqual && !has_blocks(row.collective))) continue;
          for (const int window : {1, 2, 4, 16}) {
            const Memory memory = (seed + uint64_t(window)) % 2 ? Memory::kApart : Memory::kShared;
            ASSERT_EQ(together.run(row, shape, memory, window), "")
                << row.name << " window " << window << (memory == Memory::kShared ? " in place, " : ", ")
                << shape.text();
          }
        }
      }
    }
  }
}

TEST_P(Schedules, RunInThreads) {
  constexpr int kRanks = 5;
  Messengers wires(kRanks, GetParam().options);
  const auto ports = wires.ports(78);
  as_threads(kRanks, [&](int rank) {
    net::GroupPort& port = *ports[size_t(rank)];
    uint32_t op = 0;
    for (const Row& row : schedule::catalog()) {
      for (const size_t elements : {size_t(3), size_t(2000)}) {
        const Shape shape = shape_of({row.collective, kRanks, elements, 4, int(op % kRanks), Blocks::kEqual, op});
        if (!legal(row, shape)) continue;
        Part part(shape, rank, op % 2 ? Memory::kApart : Memory::kShared, op);
        OpenRun run(port, part.args(row, ++op, 4));
        ASSERT_EQ(run.drive(), Progress::kDone) << row.name;
        run.end_operation(op);
        ASSERT_EQ(part.verdict(), "") << row.name;
      }
    }
  });
}

/// A message is sent when its place is free, so the link never has to store device memory elsewhere.
TEST_P(Schedules, MoveDeviceMemoryWithoutAHostCopy) {
  constexpr int kRanks = 4;
  net::LoopbackNet::Options options = GetParam().options;
  options.no_device_memory = "";
  Messengers wires(kRanks, options);
  const auto ports = wires.ports(81);
  const Row& row = *schedule::find(Collective::kAllGather, "direct");
  std::atomic<uint64_t> moved{0};
  std::array<std::deque<Part>, kRanks> parts;  // an address that was a device's stays one
  as_threads(kRanks, [&](int rank) {
    uint32_t op = 0;
    for (const size_t elements : {size_t(0), size_t(1), size_t(50), size_t(3000)}) {
      const Shape shape = shape_of({row.collective, kRanks, elements * kRanks, 4, 0, Blocks::kEqual, op});
      Part& part = parts[size_t(rank)].emplace_back(shape, rank, Memory::kShared, op);
      wires.messenger(rank).use_device_memory(part.memory());
      net::ScheduleArgs args = part.args(row, ++op, 4);
      args.on_device = true;
      OpenRun run(*ports[size_t(rank)], args);
      ASSERT_EQ(run.drive(), Progress::kDone);
      run.end_operation(op);
      ASSERT_EQ(part.verdict(), "");
      moved += elements * 4 * (kRanks - 1);
    }
  });
  EXPECT_EQ(wires.net().counts().device_bytes, moved);
  EXPECT_EQ(wires.net().counts().host_copies, 0u);
}

/// If a peer sends before the receiver's announcement that the place is free, the link stores the message elsewhere.
TEST(ScheduleRuns, RefuseAMessageForADeviceThatTheHostWouldHaveToCopy) {
  Messengers wires(2);
  const auto ports = wires.ports(82);
  const Shape shape = shape_of({Collective::kAllGather, 2, 100, 4});
  as_threads(2, [&](int rank) {
    Part part(shape, rank, Memory::kShared, 0);
    net::ScheduleArgs args = part.args(*schedule::find(Collective::kAllGather, "direct"), 1, 4);
    args.on_device = rank == 0;
    OpenRun run(*ports[size_t(rank)], args);
    const Progress progress = run.drive(std::chrono::milliseconds(rank == 0 ? 20'000 : 300));
    if (rank != 0) return;
    EXPECT_EQ(progress, Progress::kFailed);
    EXPECT_EQ(run->verdict().cause, net::ScheduleRun::Verdict::Cause::kGarbage);
  });
}

/// Several runs of one operation, and runs of several groups: each drives the others while it waits.
TEST(ScheduleRuns, GoOnBesideEachOther) {
  constexpr int kRanks = 4, kGroups = 3, kOps = 6;
  net::LoopbackNet::Options options = kConditions[3].options;
  Messengers wires(kRanks, options);
  std::vector<std::vector<std::unique_ptr<net::GroupPort>>> ports;
  for (int g = 0; g < kGroups; ++g) ports.push_back(wires.ports(uint64_t(100 + g)));
  const Row& row = *schedule::find(Collective::kAllReduce, "ring");
  const Shape shape = shape_of({Collective::kAllReduce, kRanks, 999, 4});
  as_threads(kRanks, [&](int rank) {
    std::deque<Part> parts;
    std::deque<OpenRun> runs;
    for (int i = 0; i < kOps * kGroups; ++i) {
      const int g = (i + rank) % kGroups;  // in a different order on each rank
      net::GroupPort& port = *ports[size_t(g)][size_t(rank)];
      parts.emplace_back(shape, rank, Memory::kShared, uint64_t(g * 100 + i / kGroups));
      runs.emplace_back(port, parts.back().args(row, 1 + uint32_t(i / kGroups / 2), 2, uint16_t(i / kGroups % 2)));
    }
    bool all = false;
    WaitRules rules;
    rules.deadline = Deadline::after(std::chrono::seconds(20));
    const auto ended = [&] {
      all = true;
      for (OpenRun& run : runs) all &= run->advance() == Progress::kDone;
      return all;
    };
    wires.messenger(rank).wait(
        ended, [] {}, -1, rules);
    ASSERT_TRUE(all);
    runs.clear();
    for (const Part& part : parts) EXPECT_EQ(part.verdict(), "");
  });
}

/// Rank 1 keeps the messages of the later run until the first has ended, and needs one more of the first run.
TEST(ScheduleRuns, LeaveCreditForTheOldest) {
  constexpr int kRanks = 3;
  Messengers wires(kRanks, kConditions[0].options);
  const auto ports = wires.ports(83);
  const Row& ring = *schedule::find(Collective::kAllReduce, "ring");
  const Row& chain = *schedule::find(Collective::kBroadcast, "chain");
  const Shape small = shape_of({Collective::kAllReduce, kRanks, 30'000, 4});
  const Shape large = shape_of({Collective::kBroadcast, kRanks, 2 << 20, 4});
  as_threads(kRanks, [&](int rank) {
    net::GroupPort& port = *ports[size_t(rank)];
    if (rank == 2) {  // until then rank 0 can send rank 1 no more of the first run
      EXPECT_TRUE(eventually(std::chrono::seconds(10), [&] { return wires.net().counts().bytes > 4'000'000; }));
    }
    Part first(small, rank, Memory::kShared, 0), later(large, rank, Memory::kShared, 1);
    OpenRun one(port, first.args(ring, 1, 4, 0));
    std::optional<OpenRun> two;
    if (rank == 0) two.emplace(port, later.args(chain, 1, 4, 1));
    ASSERT_EQ(one.drive(), Progress::kDone);
    one.end();
    if (rank != 0) two.emplace(port, later.args(chain, 1, 4, 1));
    ASSERT_EQ(two->drive(), Progress::kDone);
    EXPECT_EQ(first.verdict() + later.verdict(), "");
  });
}

/// The data that a root may send before its receivers take it is bounded; later everything arrives.
class Ahead : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Bytes, Ahead, testing::Values(0, 40, 100'000, 3'000'000));

TEST_P(Ahead, ARootIsStoppedByItsReceivers) {
  constexpr size_t kCredit = 6 << 20, kSegment = 64 << 10;
  const size_t bytes = GetParam();
  const uint32_t ops = bytes < 1000 ? 10'000 : uint32_t(20'000'000 / bytes);
  Messengers wires(2);
  const auto ports = wires.ports(79);
  const Row& row = *schedule::find(Collective::kBroadcast, "binomial");
  const Shape shape = shape_of({Collective::kBroadcast, 2, bytes / 4, 4});
  std::atomic<bool> stopped{false};
  std::atomic<uint32_t> sent{0};
  as_threads(2, [&](int rank) {
    net::GroupPort& port = *ports[size_t(rank)];
    if (rank == 1) {
      uint32_t before = 1;  // it has stopped if it has made no progress for a while
      eventually(std::chrono::seconds(10), [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return sent != 0 && std::exchange(before, sent.load()) == sent;
      });
      const net::LoopbackNet::Counts counts = wires.net().counts();
      EXPECT_LT(sent, ops) << "nothing stops the root";
      EXPECT_LE(counts.bytes, kCredit + kSegment);
      EXPECT_LE(counts.posted, 7000) << "messages of no bytes cost memory too";
      stopped = true;
    }
    for (uint32_t op = 1; op <= ops; ++op) {
      Part part(shape, rank, Memory::kApart, op);
      OpenRun run(port, part.args(row, op, 4));
      ASSERT_EQ(run.drive(), Progress::kDone) << op;
      if (rank == 0) ++sent;
      run.end_operation(op);
      ASSERT_TRUE(op % 997 != 0 || part.verdict().empty());
    }
  });
  EXPECT_TRUE(stopped);
}

/// A segment may be longer than the amount after which a receiver acknowledges.
TEST(ScheduleRuns, SegmentsLongerThanTheCreditGoOneByOne) {
  net::LoopbackNet::Options options;
  options.segment_bytes = options.place_above = 5 << 20;
  Messengers wires(2, options);
  const auto ports = wires.ports(80);
  const Row& row = *schedule::find(Collective::kAllReduce, "pair");
  as_threads(2, [&](int rank) {
    net::GroupPort& port = *ports[size_t(rank)];
    for (uint32_t op = 1; op <= (why_no_processes() ? 2u : 6u); ++op) {
      const Shape shape = shape_of({Collective::kAllReduce, 2, op % 2 ? size_t(100) : size_t(11 << 17), 4});
      Part part(shape, rank, Memory::kApart, op);
      OpenRun run(port, part.args(row, op, 4));
      ASSERT_EQ(run.drive(), Progress::kDone) << op;
      run.end_operation(op);
      ASSERT_EQ(part.verdict(), "");
    }
  });
}

/// The CPU seconds of this thread per broadcast, for so many broadcasts that the root has ended before.
double cost_of_catching_up(uint32_t ops) {
  Messengers wires(2);
  const auto ports = wires.ports(81);
  const Row& row = *schedule::find(Collective::kBroadcast, "binomial");
  const Shape shape = shape_of({Collective::kBroadcast, 2, 10, 4});
  Part root(shape, 0, Memory::kApart, 1), behind(shape, 1, Memory::kApart, 1);
  const auto call = [&](int rank, Part& part, uint32_t op) {
    OpenRun run(*ports[size_t(rank)], part.args(row, op, 4));
    EXPECT_EQ(run.drive(), Progress::kDone);
    run.end_operation(op);
  };
  for (uint32_t op = 1; op <= ops; ++op) call(0, root, op);
  {
    net::Messenger& messenger = wires.messenger(1);
    MutexLock lock(messenger.mutex());
    while (messenger.progress()) {
    }
  }
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
  };
  const double begun = now();
  for (uint32_t op = 1; op <= ops; ++op) call(1, behind, op);
  return (now() - begun) / ops;
}

/// The cost of catching up must not depend on the number of early segments.
TEST(ScheduleRuns, CostTheSameHoweverMuchHasComeEarly) {
  constexpr uint32_t kFew = 50, kMany = 3500;  // as many as the credit allows
  double few = 1, many = 1;
  for (int i = 0; i < 5; ++i) {
    few = std::min(few, cost_of_catching_up(kFew));
    many = std::min(many, cost_of_catching_up(kMany));
  }
  EXPECT_LT(many, 4 * few);
}

}  // namespace
}  // namespace nvx::test
