// Set-up and teardown of a channel between GPUs: a failure on one rank is reported to all, and memory that a kernel may
// still write to is never freed.

#include <gtest/gtest.h>

#include "group/device/block_budget.h"
#include "group/setup/store_bootstrap.h"
#include "support/kernel_executors.h"
#include "support/pushes.h"
#include "support/sizes.h"
#include "support/stores.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// Ranks connect through a store and one of them fails: each must report that rank's reason.
void all_report(const std::string& reason, const DeviceWorld::Shape& shape,
                const std::function<void(DeviceWorld&)>& hinder) {
  DeviceWorld world(shape);
  hinder(world);
  MemoryStore store;
  as_threads(shape.ranks, [&](int rank) {
    StoreBootstrap bootstrap(store, {.prefix = "here", .rank = rank, .ranks = shape.ranks});
    const auto failure = failure_to_make(world, rank, bootstrap);
    ASSERT_TRUE(failure);
    const std::string text = failure->what();
    EXPECT_TRUE(contains(text, reason)) << text;
    EXPECT_TRUE(contains(text, "rank 1")) << text;
    const bool is_reported = failure->code() == Code::kPeerFailed;
    EXPECT_TRUE(is_reported || contains(text, "GPU " + std::to_string(rank) + " cannot be used on rank " +
                                                  std::to_string(rank) + ": "))
        << text;
    EXPECT_TRUE(is_reported || contains(text, ". Next: ")) << text;
  });
  for (int rank = 0; rank < shape.ranks; ++rank) {
    DeviceArena* const made = world.process(rank).registry->made(rank);
    EXPECT_TRUE(!made || rank == 1 || made->used() == 0) << "what was not exported is free again";
  }
}

TEST(DeviceSetup, AllRanksReportTheReasonOfOneRank) {
  const DeviceWorld::Shape processes{.ranks = 3, .processes = true};
  all_report("this build has no CUDA", processes, [](DeviceWorld& world) {
    world.launcher(1)->refusal = {Code::kInvalid, "nvx: this build has no CUDA"};
  });
  all_report("rank 1", processes, [](DeviceWorld& world) { world.process(1).driver->refuse("describe", 100); });
  all_report("querying the GPU's UUID", {.ranks = 3, .processes = true, .timeout = milliseconds(300)},
             [](DeviceWorld& world) {
               with_executors(world, [](DeviceRank&) {});  // later groups do not probe
               world.process(1).driver->block("describe");
             });
}

TEST(DeviceSetup, AllRanksNameAGpuWithoutFreeBlocks) {
  DeviceWorld world({.ranks = 3, .gpus = 1, .resident = 2});
  const SharedTable table(3);
  as_threads(3, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    const auto failure = failure_to_make(world, rank, bootstrap);
    ASSERT_TRUE(failure);
    EXPECT_TRUE(
        contains(failure->what(),
                 "GPU 0 of the group holds 2 blocks at once; its 3 ranks need all of "
                 "their blocks there at once: not even one per rank fits, so the ranks would wait for each other"))
        << failure->what();
  });
}

/// The advice comes from the rank that has the cause: a refusal by the system, or the end of another rank.
TEST(DeviceSetup, AdviceComesFromTheRankThatHasTheCause) {
  DeviceWorld world({.ranks = 1});
  world.launcher(0)->refusal = Failure{.code = Code::kPeerDied,
                                       .cause = "rank 3 has ended",
                                       .advice = "see the log of global rank 3",
                                       .before = "all else had failed",
                                       .lost_rank = 3,
                                       .exit_status = {nvx::ExitStatus::How::kKilled, 9}};
  const SharedTable table(1);
  SharedBootstrap bootstrap(table, 0);
  const auto error = failure_to_make(world, 0, bootstrap);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->reason(),
            "GPU 0 cannot be used on rank 0: rank 3 has ended; before that, all else had failed. Next: see the log "
            "of global rank 3");
  EXPECT_EQ(error->code(), Code::kPeerDied);
  EXPECT_EQ(error->failure().lost_rank, 3);
  EXPECT_EQ(error->failure().exit_status, world.launcher(0)->refusal.failure().exit_status);
}

TEST(DeviceSetup, AFullArenaIsReportedAndStaysAsItWas) {
  DeviceWorld world({.ranks = 1, .arena = 2 * M});
  const SharedTable first(1), second(1), third(1);
  SharedBootstrap meet_first(first, 0), meet_second(second, 0), meet_third(third, 0);
  const auto executor = world.make(0, meet_first, world.options(0));
  const Span rest = world.arena(0).allocate(2 * M - world.arena(0).used() - 256 * 1024);
  const size_t used = world.arena(0).used();
  const auto failure = failure_to_make(world, 0, meet_second);
  ASSERT_TRUE(failure);
  EXPECT_TRUE(contains(failure->what(), "the shared memory of GPU 0 is full (")) << failure->what();
  EXPECT_TRUE(contains(failure->what(), "destroy groups that are no longer needed")) << failure->what();
  EXPECT_EQ(world.arena(0).used(), used);
  world.arena(0).free(rest);
  EXPECT_FALSE(failure_to_make(world, 0, meet_third));
}

/// Each call of the driver fails in turn. Set-up succeeds or fails. All memory is freed except memory that a device may
/// still access because the rank could not notify the others that it ended.
TEST(DeviceSetup, AllMemoryIsFreedWhicheverDriverCallFails) {
  int tried = 0;
  for (std::string faulted = "at first"; !faulted.empty(); tried += int(as_fast(1, 5))) {
    Process process(1, 2 * M);
    process.driver->fail_call(tried);
    {
      DeviceWorld world({.ranks = 1});
      const SharedTable table(1);
      SharedBootstrap bootstrap(table, 0);
      try {
        KernelExecutor executor(*process.registry, bootstrap, world.options(0), world.launcher(0), world.launcher(0));
      } catch (const Error& error) {
        EXPECT_TRUE(contains(error.what(), "GPU 0 cannot be used on rank 0: ")) << error.what();
      }
    }
    faulted = process.driver->faulted_call();
    process.registry.reset();
    std::string unreleased;
    const auto settled = [&] {
      unreleased = process.driver->unreleased();
      return unreleased.empty() || faulted == "drained" || (faulted == "copy" && contains(unreleased, "1 streams"));
    };
    // A thread that has made a call frees its resources shortly after its end is reported.
    EXPECT_TRUE(eventually(milliseconds(5000), settled)) << "call " << tried << ", " << faulted << ": " << unreleased;
  }
  EXPECT_GT(tried, 40);
}

/// The same with calls that do not return: set-up ends nevertheless and frees no memory that they may access.
TEST(DeviceSetup, SetUpEndsWhicheverDriverCallHangs) {
  // A call that returns late may still use them.
  static auto* const kKept = new std::vector<std::unique_ptr<DeviceRegistry>>;
  const milliseconds timeout(as_fast(100, 1000));
  const auto set_up = [&](Process& process) {
    DeviceWorld world({.ranks = 1});
    const SharedTable table(1);
    SharedBootstrap bootstrap(table, 0);
    try {
      KernelExecutor executor(*process.registry, bootstrap, world.options(0), world.launcher(0), world.launcher(0));
    } catch (const Error&) {
    }
  };
  Process clean(1, 2 * M, timeout);
  const SharedTable table(1);
  SharedBootstrap bootstrap(table, 0);
  { const PeerMappings mappings(*clean.registry, bootstrap, options_of(0, 1, 0)); }
  const int first = clean.driver->calls();  // earlier calls have their own tests
  for (int n = first, faulted = 0; faulted < 12; ++n, ++faulted) {
    Process process(1, 2 * M, timeout);
    process.driver->block_call(n);
    const auto began = Clock::now();
    set_up(process);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(20)) << n;
    process.driver->unblock();
    kKept->push_back(std::move(process.registry));
    if (process.driver->faulted_call().empty()) break;
  }
}

TEST(DeviceSetup, MalformedDescriptionsOfPeersAreRefused) {
  const struct {
    size_t size;  // size of the spoilt field
    size_t at;
    uint8_t with;
    const char* reason;
  } kForged[] = {
      {80, 0, 0, "rank 1 describes its GPU in the format of another version of nvx"},
      {80, 4, 9, "rank 1 describes its GPU in the format of another version of nvx"},
      {80, 72, 3, "rank 1 describes its GPU in the format of another version of nvx"},  // a link that does not exist
      {16, 0, 0, "rank 1 describes its GPU in the format of another version of nvx"},
      {16, 15, 0xff, "rank 1 reports a pad outside its GPU memory"},  // so far outside that the addition wraps
      {16, 11, 0x7f, "rank 1 reports a pad outside its GPU memory"},
      {16, 8, 1, "rank 1 reports a pad outside its GPU memory"},  // not aligned to a line
  };
  for (const auto& forged : kForged) {
    DeviceWorld world({.ranks = 2});
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      SharedBootstrap honest(table, rank);
      FalseBootstrap bootstrap(honest, [&](int, std::vector<std::byte>& bytes) {
        if (rank == 1 && bytes.size() == forged.size) bytes[forged.at] = std::byte(forged.with);
      });
      const auto failure = failure_to_make(world, rank, bootstrap);
      ASSERT_TRUE(failure) << forged.at;
      EXPECT_EQ(failure->code(), Code::kMismatch);
      EXPECT_TRUE(contains(failure->what(), forged.reason)) << failure->what();
    });
  }
}

// ---- several groups on one GPU

/// A group of all ranks of a world. Each rank holds several such groups.
std::unique_ptr<KernelExecutor> make_group(DeviceWorld& world, int rank, const SharedTable& table, uint32_t blocks) {
  SharedBootstrap bootstrap(table, rank);
  ChannelOptions options = world.options(rank);
  options.blocks = blocks;
  return world.make(rank, bootstrap, options);
}

/// One all-reduce of a group of all ranks of the world, on its own stream.
struct InFlight {
  void begin(KernelExecutor& executor, int rank) {
    data.assign(100, rank + 1);
    std::vector<Operation> operations;
    operations.push_back(all_reduce(data));
    const Operation* const list[] = {&operations[0]};
    begun = executor.launch(list, {.native = &stream}, milliseconds(as_fast(2000, 20'000)));
  }
  /// The error of the operation; empty if there is none.
  std::string verdict(KernelExecutor& executor) {
    if (!begun.ok()) return begun.what();
    (void)eventually(std::chrono::seconds(60), [&] { return stream.idle(); });
    const Status ended = executor.verdict();
    if (!ended.ok()) return ended.what();
    return data == std::vector<int32_t>(100, 3) ? "" : "the sum is wrong";
  }

  std::vector<int32_t> data;
  Status begun;
  SimulatedStream stream;
};

/// Each rank launches the kernel of the other group first, and it keeps the blocks that it was given. If each group
/// counted only itself, the second kernels would find no room and all ranks would run into their timeout.
TEST(BlockBudget, GroupsWhoseKernelsRunTogetherGetSeparateBlocks) {
  for (const bool processes : {false, true}) {
    DeviceWorld world({.ranks = 2, .gpus = 1, .processes = processes, .resident = 8});
    const SharedTable first(2), second(2), begun(2), done(2);
    as_threads(2, [&](int rank) {
      const auto a = make_group(world, rank, first, /*blocks=*/4), b = make_group(world, rank, second, /*blocks=*/4);
      EXPECT_EQ(a->shape().blocks, 1u);
      EXPECT_EQ(b->shape().blocks, 1u);
      const std::string whose =
          processes ? "4 of them for each of 2 processes; a process's rank needs" : "its 2 ranks need";
      EXPECT_TRUE(contains(a->resources().why_fewer_blocks(), "GPU 0 of the group holds 8 blocks at once; " + whose))
          << a->resources().why_fewer_blocks();
      EXPECT_TRUE(contains(b->resources().why_fewer_blocks(),
                           (processes ? "1" : "2") + std::string(" of them are reserved for other groups")));
      SharedBootstrap meet_begun(begun, rank), meet_done(done, rank);
      InFlight of_a, of_b;
      (rank == 0 ? of_a : of_b).begin(rank == 0 ? *a : *b, rank);
      (void)meet_begun.all_gather({});
      (rank == 0 ? of_b : of_a).begin(rank == 0 ? *b : *a, rank);
      EXPECT_EQ(of_a.verdict(*a), "");
      EXPECT_EQ(of_b.verdict(*b), "");
      (void)meet_done.all_gather({});
    });
  }
}

/// Four processes on one GPU, and the groups of a mesh of two by two in the order of their first uses: the world (0),
/// the pairs of each dimension (1, 2), and all ranks flattened. If pairs counted only their own processes, the later
/// groups would find nothing left.
TEST(BlockBudget, GroupsOfAMeshOnOneGpuAllGetBlocks) {
  constexpr int kGroups = 5, kResident = 4 * kGroups;
  for (const auto& order : {std::array{0, 1, 2, 3, 4}, std::array{1, 2, 0, 3, 4}}) {
    DeviceWorld world({.ranks = 4, .gpus = 1, .processes = true, .resident = kResident});
    std::vector<std::unique_ptr<SharedTable>> tables;  // by turn: two of two ranks, or one of four
    for (const int group : order) {
      for (int i = 0; i < 2; ++i) tables.push_back(std::make_unique<SharedTable>(group == 1 || group == 2 ? 2 : 4));
    }
    const SharedTable done(4);
    std::atomic<uint32_t> blocks{0};
    as_threads(4, [&](int rank) {
      std::vector<std::unique_ptr<KernelExecutor>> executors;
      for (int turn = 0; turn < kGroups; ++turn) {
        const int group = order[size_t(turn)], pair = group == 1 ? rank / 2 : group == 2 ? rank % 2 : 0;
        const SharedTable& table = *tables[size_t(2 * turn + pair)];
        ChannelOptions options = world.options(rank);
        options.blocks = 16;
        options.processes = 4;
        options.rank = group == 1 ? rank % 2 : group == 2 ? rank / 2 : rank;
        options.ranks = table.ranks();
        SharedBootstrap bootstrap(table, options.rank);
        executors.push_back(world.make(rank, bootstrap, options));
        blocks += executors.back()->shape().blocks;
      }
      SharedBootstrap meet_done(done, rank);
      (void)meet_done.all_gather({});
    });
    EXPECT_EQ(blocks, uint32_t(kResident)) << "all that the GPU holds, and no more";
  }
}

TEST(BlockBudget, LaterGroupsGetTheRemainingBlocks) {
  DeviceWorld world({.ranks = 2, .gpus = 1, .arena = 16 * M, .resident = 10});
  const SharedTable tables[]{SharedTable(2), SharedTable(2), SharedTable(2), SharedTable(2),
                             SharedTable(2), SharedTable(2), SharedTable(2)};
  as_threads(2, [&](int rank) {
    std::vector<std::unique_ptr<KernelExecutor>> executors;
    for (int g = 0; g < 5; ++g) {
      executors.push_back(make_group(world, rank, tables[g], /*blocks=*/16));
      EXPECT_EQ(executors.back()->shape().blocks, 1u) << g;
    }
    std::string refused;
    try {
      (void)make_group(world, rank, tables[5], /*blocks=*/16);
    } catch (const Error& error) {
      refused = error.what();
    }
    EXPECT_TRUE(contains(refused,
                         "GPU 0 of the group holds 10 blocks at once; 10 of them are reserved for other groups; "
                         "its 2 ranks need all of their blocks there at once: not even one per rank fits"))
        << refused;
    EXPECT_TRUE(contains(refused, "destroy groups that are no longer needed")) << refused;
    executors.clear();
    SharedBootstrap gone(tables[6], rank);
    (void)gone.all_gather({});
  });
  const SharedTable again(2);
  as_threads(2, [&](int rank) {
    const auto executor = make_group(world, rank, again, /*blocks=*/16);
    EXPECT_FALSE(contains(executor->resources().why_fewer_blocks(), "reserved"))
        << executor->resources().why_fewer_blocks();
  });
}

/// Groups that are set up concurrently, in any order of their ranks, never get more blocks than there are.
TEST(BlockBudget, GroupsThatAreSetUpAtTheSameTimeCountEachOther) {
  constexpr int kGroups = 3, kResident = 5;
  for (size_t round = 0; round < as_fast(20, 5); ++round) {
    const bool processes = round % 2 == 0;
    DeviceWorld world({.ranks = 2, .gpus = 1, .processes = processes, .resident = kResident});
    std::vector<std::unique_ptr<SharedTable>> tables;
    for (int g = 0; g < kGroups; ++g) tables.push_back(std::make_unique<SharedTable>(2));
    const SharedTable done(2 * kGroups);
    std::atomic<uint32_t> blocks{0};
    as_threads(2 * kGroups, [&](int thread) {
      std::unique_ptr<KernelExecutor> executor;
      try {
        executor = make_group(world, thread % 2, *tables[size_t(thread / 2)], /*blocks=*/16);
        blocks += executor->shape().blocks;
      } catch (const Error&) {
      }
      SharedBootstrap bootstrap(done, thread);
      (void)bootstrap.all_gather({});
    });
    EXPECT_LE(blocks, uint32_t(kResident));
    EXPECT_TRUE(processes || blocks >= 2) << "one of them was the first";
  }
}

/// A captured kernel that is replayed later ends when it finds its group aborted, so its blocks are free.
TEST(BlockBudget, AKernelThatNeverEndsHoldsItsBlocksAndACapturedOneDoesNot) {
  for (const bool captured : {false, true}) {
    DeviceWorld world({.ranks = 1, .resident = 4});
    const SharedTable first(1), second(1);
    SharedBootstrap meet_first(first, 0), meet_second(second, 0);
    ChannelOptions options = world.options(0);
    options.drain_timeout = milliseconds(50);
    auto executor = world.make(0, meet_first, options);
    const uint32_t blocks = executor->shape().blocks;
    Operation barrier;
    barrier.collective = Collective::kBarrier;
    const Operation* const list[] = {&barrier};
    ASSERT_TRUE(executor->launch(list, {.capture = captured}, milliseconds(0)).ok());
    executor.reset();
    const auto next = world.make(0, meet_second, world.options(0));
    EXPECT_EQ(contains(next->resources().why_fewer_blocks(), std::to_string(blocks) + " of them are reserved"),
              !captured)
        << next->resources().why_fewer_blocks();
  }
}

// ---- teardown

Operation barrier_operation() {
  Operation operation;
  operation.collective = Collective::kBarrier;
  return operation;
}

TEST(DeviceTeardown, MemoryThatAKernelMayWriteToIsNotReleased) {
  DeviceWorld world({.ranks = 1});
  const SharedTable table(1);
  SharedBootstrap bootstrap(table, 0);
  ChannelOptions options = world.options(0);
  options.drain_timeout = milliseconds(50);
  auto executor = world.make(0, bootstrap, options);
  const kernel::DeviceChannel channel = executor->resources().channel();
  const Operation operation = barrier_operation();
  const Operation* const list[] = {&operation};
  ASSERT_TRUE(executor->launch(list, LaunchStream(), milliseconds(0)).ok());
  const std::string unreleased = world.process(0).driver->unreleased();
  const size_t used = world.arena(0).used();
  executor.reset();
  world.leave();
  FakeDriver& driver = *world.process(0).driver;  // a thread of its own destroys the copy's stream
  EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return driver.unreleased() == unreleased; }))
      << driver.unreleased();
  world.arena(0).free(world.arena(0).allocate(1));
  EXPECT_EQ(world.arena(0).used(), used);
  EXPECT_EQ(channel.control->abort, 1u) << "it was cancelled";
  auto* const words = reinterpret_cast<uint64_t*>(channel.state);  // atomic: the kernels are being stopped by a copy
  for (size_t i = 0; i < kernel::DeviceState{channel.shape}.bytes() / sizeof *words; ++i)
    std::atomic_ref(words[i]).store(~uint64_t(0));
}

/// The driver may free memory only when all kernels of the process have ended, and those of other groups may wait for a
/// rank that comes and goes here.
TEST(DeviceTeardown, GroupsComeAndGoWhileAKernelOfAnotherWaits) {
  DeviceWorld world({.ranks = 2, .processes = true});
  const SharedTable first(2), second(2), begun(2), gone(2);
  as_threads(2, [&](int rank) {
    SharedBootstrap meet_begun(begun, rank), meet_gone(gone, rank);
    const auto a = make_group(world, rank, first, /*blocks=*/2);
    InFlight of_a;
    if (rank == 0) of_a.begin(*a, rank);
    (void)meet_begun.all_gather({});
    const FakeDriver& driver = *world.process(rank).driver;
    const auto frees = [&] {
      return driver.calls_of("free") + driver.calls_of("unmap") + driver.calls_of("release") + driver.calls_of("unpin");
    };
    const int before = frees();
    {
      SharedBootstrap bootstrap(second, rank);
      const auto launcher = std::make_shared<SimulatedLauncher>(world.process(rank).driver, rank,
                                                                std::make_shared<SimulatedRoom>(/*blocks=*/64));
      KernelExecutor b(*world.process(rank).registry, bootstrap, world.options(rank), launcher, launcher);
      EXPECT_TRUE(b.finalize());
    }
    EXPECT_EQ(frees(), before);
    (void)meet_gone.all_gather({});
    if (rank == 1) of_a.begin(*a, rank);
    EXPECT_EQ(of_a.verdict(*a), "");
  });
}

/// A later group uses what earlier ones have pinned.
TEST(DeviceTeardown, AThousandGroupsPinNoMoreThanTheFirst) {
  DeviceWorld world({.ranks = 1});
  const FakeDriver& driver = *world.process(0).driver;
  int first = 0;
  for (size_t group = 0; group < as_fast(1000, 50); ++group) {
    const SharedTable table(1);
    SharedBootstrap bootstrap(table, 0);
    ChannelOptions options = world.options(0);
    options.peers_gone = [] { return true; };
    (void)world.make(0, bootstrap, options);
    if (group == 0) first = driver.calls_of("pin");
  }
  EXPECT_EQ(driver.calls_of("pin"), first);
  EXPECT_EQ(driver.calls_of("unpin"), 0);
}

TEST(DeviceTeardown, AKernelThatWaitsForEverIsAborted) {
  DeviceWorld world({.ranks = 2});
  with_executors(
      world,
      [](DeviceRank& one) {
        if (one.rank == 1) return;
        std::vector<Operation> operations(1);
        operations[0].collective = Collective::kBarrier;
        ASSERT_TRUE(one.launch(operations, milliseconds(0)).ok());
        one.executor.reset();
        EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return one.stream.idle(); }));
      },
      [](ChannelOptions& options) { options.drain_timeout = milliseconds(50); });
}

TEST(DeviceTeardown, LeavingWaitsForOperationsInFlight) {
  DeviceWorld world({.ranks = 2});
  with_executors(world, [](DeviceRank& one) {
    const Spec spec = spec_of(Collective::kAllReduce, 3000, 2, 1);
    Side side(spec, one.rank, 2);
    std::vector<Operation> operations;
    operations.push_back(operation_of(spec, side, 2));
    if (one.rank == 1) std::this_thread::sleep_for(milliseconds(50));
    ASSERT_TRUE(one.launch(operations).ok());
    one.executor.reset();
    EXPECT_EQ(side.verdict(), "");
  });
}

/// A kernel may report its end before its last stores to peers are complete. So a rank leaves when the stream has
/// passed the kernel, not when all operations are reported.
TEST(DeviceTeardown, AReportedEndIsNotThatOfTheKernel) {
  DeviceWorld world({.ranks = 1});
  with_executors(world, [&](DeviceRank& one) {
    std::atomic<bool>& knows_ends = world.launcher(0)->knows_ends;
    knows_ends = false;
    ASSERT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 1, 1)}), "");
    ASSERT_TRUE(one.executor->settled());
    std::atomic<bool> reported{false};
    std::thread notifies([&] {
      std::this_thread::sleep_for(milliseconds(100));
      reported = true;
      knows_ends = true;
    });
    EXPECT_TRUE(one.executor->finalize());
    EXPECT_TRUE(reported);
    notifies.join();
  });
}

TEST(DeviceTeardown, MemoryOfAKernelThatMayStillStoreStays) {
  DeviceWorld world({.ranks = 1});
  world.launcher(0)->knows_ends = false;
  with_executors(
      world,
      [](DeviceRank& one) {
        ASSERT_EQ(one.perform({spec_of(Collective::kAllReduce, 100, 1, 1)}), "");
        EXPECT_FALSE(one.executor->finalize()) << "it would announce that it has left";
      },
      [](ChannelOptions& options) { options.drain_timeout = milliseconds(50); });
  world.arena(0).free(world.arena(0).allocate(1));
  EXPECT_GT(world.arena(0).used(), size_t(0));
}

/// A rank that has seen the end of a failed group's kernels gets its memory back.
TEST(DeviceTeardown, FailedGroupFreesMemoryOfEndedKernels) {
  for (const bool knows : {false, true}) {
    DeviceWorld world({.ranks = 2});
    for (int r = 0; r < 2; ++r) world.launcher(r)->knows_ends = knows;
    with_executors(world, [](DeviceRank& one) {
      const Collective call = one.rank == 0 ? Collective::kAllReduce : Collective::kReduceScatter;
      EXPECT_NE(one.perform({spec_of(call, 100, 2, 1)}), "");
    });
    for (int r = 0; r < 2; ++r) {
      world.arena(r).free(world.arena(r).allocate(1));
      EXPECT_EQ(world.arena(r).used() == 0, knows);
    }
  }
}

}  // namespace
}  // namespace nvx::test
