// Every error of a driver call, and every call that does not return: all ranks end alike and in time, and no memory is
// returned that a device may still write.

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "memory/driver/thread_call.h"
#include "support/gpu_processes.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using enum ShareKind;

const std::vector<ShareKind> kAll{}, kNoFabric{kFabric}, kIpcOnly{kFabric, kFd};

/// The outcome of an attempted set-up of mappings.
struct Outcome {
  std::optional<ShareKind> kind;  // how the other rank is reached; nothing: an error
  std::string reason;             // why not better, or why it failed
};

/// `made` is called when the mappings exist, before they are used.
Outcome try_to_share(
    DeviceRegistry& registry, Bootstrap& bootstrap, const MappingOptions& options,
    const std::function<void()>& made = [] {}) {
  try {
    const PeerMappings mappings(registry, bootstrap, options);
    made();
    write_and_look(mappings, bootstrap, options.rank, options.ranks);
    return {mappings.peer(1 - options.rank).kind, mappings.agreement().why_not_better + mappings.fallbacks()};
  } catch (const Error& error) {
    return {std::nullopt, error.what()};
  }
}

/// Short timeouts for calls that may hang, long ones for the others, because the machine may be busy.
MappingOptions patient(int rank, bool faulty) {
  MappingOptions options = options_of(rank, 2, rank);
  options.timeout = milliseconds(faulty ? as_fast(300, 2000) : 10'000);
  return options;
}

constexpr auto kError = std::nullopt;

/// A call of rank 1's driver that fails, or does not return, each time.
struct Fault {
  const std::vector<ShareKind>& lacking;
  const char* call;
  std::optional<ShareKind> refused;  // how ranks 0 and 1 then reach each other
  std::optional<ShareKind> hung;
  const char* reason;  // beside the driver's text
};

const Fault kFaults[] = {
    // The device does not work at all.
    {kAll, "describe", kError, kError, "no pinned host memory: rank 1: "},
    {kAll, "create_stream", kError, kError, "no pinned host memory: rank 1: "},
    // A kind cannot be created, exported or imported: the next one is used.
    {kAll, "granularity", kIpc, kIpc, "no fabric handle: rank 1: "},
    {kAll, "create", kIpc, kIpc, "no fabric handle: rank 1: "},
    {kAll, "reserve", kIpc, kIpc, "no fabric handle: rank 1: "},
    {kAll, "map", kIpc, kIpc, "no file descriptor: rank 1: "},
    {kAll, "allow", kIpc, kIpc, "no file descriptor: rank 1: "},
    {kAll, "export_fabric", kFd, kFd, "no fabric handle: rank 1: "},
    {kAll, "import_fabric", kFd, kFd, "no fabric handle: rank 1: "},
    {kNoFabric, "export_fd", kIpc, kIpc, "no file descriptor: rank 1: "},
    {kNoFabric, "import_fd", kIpc, kIpc, "no file descriptor: rank 1: "},
    {kIpcOnly, "allocate", kError, kError, "rank 1"},
    {kIpcOnly, "export_ipc", kHost, kHost, "no legacy IPC: rank 1: "},
    // A pair cannot be connected: it uses pinned host memory.
    {kIpcOnly, "open_ipc", kHost, kHost, "rank 1 with the memory of rank 0: "},
    {kIpcOnly, "range", kHost, kHost, "rank 1 with the memory of rank 0: "},
    // The rank's own memory is unusable: an error on all ranks.
    {kAll, "fill", kError, kError, "GPU 1 did not fill"},
    {kAll, "drained", kError, kError, "GPU 1 did not fill"},
    {kAll, "copy", kError, kError, "GPU 1 cannot complete a copy to its own memory"},
    {kAll, "pin", kError, kError, "GPU 1 cannot complete a copy to its own memory"},
    // Calls that return resources: an error is logged; a call that hangs makes the kind unavailable.
    {kAll, "destroy_stream", kFabric, kError, "rank 1: "},
    {kAll, "release", kFabric, kIpc, "no fabric handle: rank 1: "},
    {kAll, "unmap", kFabric, kIpc, "no fabric handle: rank 1: "},
    {kAll, "unreserve", kFabric, kIpc, "no fabric handle: rank 1: "},
    {kIpcOnly, "free", kIpc, kHost, "no legacy IPC: rank 1: "},
    {kIpcOnly, "close_ipc", kIpc, kIpc, ""},
    // Not called between processes.
    {kAll, "unpin", kFabric, kFabric, ""},
    {kAll, "can_reach", kFabric, kFabric, ""},
    {kAll, "enable_peer", kFabric, kFabric, ""},
};

/// Checks the outcome against the table.
void judge(const Fault& fault, bool hangs, int rank, const Outcome& outcome) {
  const std::string row = std::string(fault.call) + (hangs ? " hangs" : " is refused") + ", rank " +
                          std::to_string(rank) + ": " + outcome.reason;
  const std::optional<ShareKind> expected = hangs ? fault.hung : fault.refused;
  EXPECT_EQ(outcome.kind.has_value(), expected.has_value()) << row;
  if (outcome.kind && expected) {
    EXPECT_EQ(*outcome.kind, *expected) << row;
  }
  const bool felt = expected != (fault.lacking.size() == 2 ? kIpc : fault.lacking.size() == 1 ? kFd : kFabric);
  if (!felt) return;
  EXPECT_NE(outcome.reason.find(fault.reason), std::string::npos) << row;
  EXPECT_NE(outcome.reason.find(hangs ? "did not return within" : "fake refusal 77"), std::string::npos) << row;
}

void check(const Fault& fault, bool hangs) {
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    const bool faulty = rank == 1;
    Process process(2, 4 * M, faulty ? milliseconds(as_fast(400, 2500)) : DeviceArena::kTimeout);
    for (const ShareKind lack : fault.lacking) process.driver->lacks(lack);
    if (faulty && hangs) process.driver->block(fault.call);
    if (faulty && !hangs) process.driver->refuse(fault.call, 77);
    SharedBootstrap bootstrap(table, rank);
    const auto began = Clock::now();
    judge(fault, hangs, rank, try_to_share(*process.registry, bootstrap, patient(rank, faulty)));
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(30)) << fault.call;
    process.driver->unblock();
  });
}

TEST(DeviceFaults, FailedOrHungDriverCallsEndAsTheTableSays) {
  constexpr size_t kAtOnce = 10;  // they mostly sleep
  constexpr size_t kRows = 2 * std::size(kFaults);
  std::atomic<size_t> next{0};
  as_threads(int(kAtOnce), [&](int) {
    for (size_t row = next++; row < kRows; row = next++) check(kFaults[row / 2], row % 2 != 0);
  });
}

/// Each call of one rank's driver in turn does not return.
TEST(DeviceFaults, WhicheverCallHangsAllRanksEndAlike) {
  const std::vector<ShareKind> none{kFabric, kFd, kIpc};
  std::atomic<int> errors{0}, hosts{0}, fine{0};
  const auto attempt = [&](const std::vector<ShareKind>& lacking, int n) {
    const SharedTable table(2);
    std::string faulted;
    std::array<Outcome, 2> outcomes;
    as_threads(2, [&](int rank) {
      Process process(2, 4 * M, rank == 1 ? milliseconds(as_fast(400, 2500)) : DeviceArena::kTimeout);
      for (const ShareKind lack : lacking) process.driver->lacks(lack);
      if (rank == 1) process.driver->block_call(n);
      SharedBootstrap bootstrap(table, rank);
      const auto began = Clock::now();
      const auto stop = [&] { process.driver->block_call(-1); };
      outcomes[size_t(rank)] = try_to_share(*process.registry, bootstrap, patient(rank, rank == 1), stop);
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(30)) << n;
      if (rank == 1) faulted = process.driver->faulted_call();
      process.driver->unblock();
    });
    const std::string row = "call " + std::to_string(n) + ", " + faulted + ": " + outcomes[1].reason;
    EXPECT_EQ(outcomes[0].kind, outcomes[1].kind) << row << " / " << outcomes[0].reason;
    for (const Outcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.kind || outcome.reason.find("did not return within") != std::string::npos) << row;
    }
    ++(outcomes[0].kind ? *outcomes[0].kind == kHost ? hosts : fine : errors);
    return !faulted.empty();
  };
  for (const auto& lacking : {kAll, kNoFabric, kIpcOnly, none}) {
    std::atomic<int> next{0};
    std::atomic<bool> more{true};
    as_threads(12, [&](int) {
      while (more) {
        if (!attempt(lacking, next.fetch_add(int(as_fast(1, 11))))) more = false;
      }
    });
  }
  EXPECT_GT(errors, 0);
  EXPECT_GT(hosts, 0);
  EXPECT_GT(fine, 0);
}

/// Two GPUs of one process, one of which cannot be made accessible to the other.
TEST(DeviceFaults, APairOfOneProcessThatHangsFallsBack) {
  for (const char* call : {"can_reach", "enable_peer"}) {
    Process process(2, 4 * M, milliseconds(as_fast(400, 2500)));
    process.driver->lacks(kFabric), process.driver->lacks(kFd);
    process.driver->block(call);
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      SharedBootstrap bootstrap(table, rank);
      const Outcome outcome = try_to_share(*process.registry, bootstrap, patient(rank, true));
      EXPECT_EQ(outcome.kind, kHost) << outcome.reason;
      EXPECT_NE(outcome.reason.find("giving access to GPU"), std::string::npos) << outcome.reason;
      const auto began = Clock::now();
      const Outcome again = try_to_share(*process.registry, bootstrap, patient(rank, true));
      EXPECT_NE(again.reason.find("found by an earlier group"), std::string::npos) << again.reason;
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(10));
    });
    process.driver->unblock();
  }
}

/// Rank 1's driver takes long to map rank 0's memory; `then` gets its process meanwhile, and its first mappings.
void map_late(milliseconds timeout, const std::function<void(Process&, Bootstrap&, const PeerMappings&)>& then,
              milliseconds blocks = milliseconds(0)) {
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    Process process(2, 4 * M, rank == 1 ? timeout : DeviceArena::kTimeout);
    process.driver->lacks(kFabric);
    std::thread unblocks;
    SharedBootstrap real(table, rank);
    FalseBootstrap bootstrap(real, [&](int round, std::vector<std::byte>&) {
      if (rank != 1 || round != 1) return;  // all kinds have been tried
      process.driver->block("import_fd");
      if (blocks.count() > 0)
        unblocks = std::thread([&] { std::this_thread::sleep_for(blocks), process.driver->unblock(); });
    });
    MappingOptions options = options_of(rank, 2, rank);
    options.timeout = milliseconds(as_fast(500, 1000));
    const PeerMappings first(*process.registry, bootstrap, options);
    then(process, bootstrap, first);
    if (unblocks.joinable()) unblocks.join();
  });
}

/// Many processes may pin memory at once, so that it takes seconds.
TEST(DeviceFaults, MappingAPeerMayTakeLongerThanACheck) {
  const auto is_mapped = [](Process& process, Bootstrap&, const PeerMappings& first) {
    for (int r = 0; r < 2; ++r) EXPECT_NE(first.peer(r).kind, kHost) << first.fallbacks();
    EXPECT_GT(process.driver->calls_of("import_fd"), 0);
  };
  map_late(DeviceArena::kTimeout, is_mapped, milliseconds(as_fast(3000, 4000)));
}

TEST(DeviceFaults, ALateMappingIsTriedAgainOnceTheDriverHasReturned) {
  map_late(milliseconds(as_fast(1000, 1500)), [](Process& process, Bootstrap& bootstrap, const PeerMappings& first) {
    const bool late = first.arena().region().device() == 1;
    const int me = late ? 1 : 0;
    EXPECT_EQ(first.peer(1 - me).kind, kHost);
    EXPECT_NE(first.fallbacks().find("did not return within"), std::string::npos) << first.fallbacks();
    const int calls = process.driver->calls_of("import_fd");
    const PeerMappings second(*process.registry, bootstrap, patient(me, false));
    EXPECT_EQ(second.peer(1 - me).kind, kHost);
    EXPECT_NE(second.fallbacks().find("found by an earlier group"), std::string::npos) << second.fallbacks();
    if (late) {
      EXPECT_EQ(process.driver->calls_of("import_fd"), calls) << "not while the first call has not returned";
      const DeviceRegistry::Import import{first.peer(0).arena, kFd, 1};
      process.driver->unblock();
      EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return process.registry->why_unusable(import).empty(); }));
    }
    const PeerMappings third(*process.registry, bootstrap, patient(me, false));
    EXPECT_EQ(third.peer(1 - me).kind, kFd) << third.fallbacks();
    write_and_look(third, bootstrap, me, 2);
  });
}

/// A pinning that hangs where it is the only way.
TEST(DeviceFaults, AWindowThatHangsIsAnErrorOnAllRanks) {
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    Process process(2, 4 * M, milliseconds(as_fast(400, 2500)));
    process.driver->pairs(0, 1, FakeDriver::PeerAccess::kRefuses);
    SharedBootstrap honest(table, rank);
    FalseBootstrap bootstrap(honest, [&](int round, std::vector<std::byte>&) {
      if (rank == 1 && round == 3) process.driver->block("pin");  // all kinds but pinned host memory have been tried
    });
    const Outcome outcome = try_to_share(*process.registry, bootstrap, patient(rank, true));
    EXPECT_FALSE(outcome.kind);
    EXPECT_NE(outcome.reason.find("rank 1: pinning 4096 KiB for GPU 1 did not return within"), std::string::npos)
        << outcome.reason;
    process.driver->unblock();
  });
}

TEST(DeviceFaults, AnArenaThatHangsIsNotMadeTwice) {
  Process process(1, 4 * M, milliseconds(as_fast(200, 1000)));
  const auto try_again = [&]() -> std::string {
    try {
      (void)process.registry->arena(0, kFd);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kTimeout);
      return error.what();
    }
  };
  process.driver->block("create");
  std::array<std::string, 3> text;
  as_threads(3, [&](int thread) { text[size_t(thread)] = try_again(); });
  for (const std::string& one : text) {
    EXPECT_NE(one.find("making 4096 KiB of memory on GPU 0 (file descriptor) did not return"), std::string::npos)
        << one;
  }
  EXPECT_EQ(process.driver->calls_of("create"), 1);
  EXPECT_NE(try_again().find("has still not returned"), std::string::npos);
  EXPECT_EQ(process.registry->made(0), nullptr);
  process.driver->unblock();
  EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return process.registry->made(0) != nullptr; }));
  EXPECT_EQ(try_again(), "");
  EXPECT_EQ(process.driver->calls_of("create"), 1);
}

TEST(DeviceFaults, AnArenaThatIsRefusedIsTriedAgain) {
  Process process(1, 4 * M);
  process.driver->refuse("create", 2);
  for (int turn = 0; turn < 2; ++turn) EXPECT_THROW((void)process.registry->arena(0, kFd), Error);
  process.driver->refuse("create", 0);
  EXPECT_EQ(process.registry->arena(0, kFd).region().kind(), kFd);
}

/// The fake driver aborts if memory is returned that its devices may still write.
TEST(DeviceFaults, MemoryThatADeviceMayWriteIsKept) {
  Process process(1, 4 * M);
  DeviceArena& arena = process.registry->arena(0, kFd);
  const Span first = arena.allocate(M);
  process.driver->refuse("drained", 700);
  try {
    (void)arena.allocate(M);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kTimeout);
    EXPECT_NE(std::string(error.what()).find("fake refusal 700, and earlier work may still be running"),
              std::string::npos)
        << error.what();
  }
  EXPECT_EQ(arena.used(), 2 * M);
  const PairVerdict verdict =
      run_check(process.registry->pinned(), {0, arena.at(first.offset), 1, 0, 0, {arena.hold()}},
                Deadline::after(milliseconds(20'000)));
  EXPECT_EQ(verdict.state, PairState::kHung);
  process.driver->refuse("drained", 0);
  arena.free(first);
  EXPECT_EQ(arena.allocate(M).offset, first.offset);
  EXPECT_EQ(arena.allocate(M).offset, 2 * M) << "what is behind the first one may still be filled";
  process.registry.reset();
  EXPECT_EQ(process.driver->unreleased(), "1 memories 1 reservations 1 mappings 1 pinned ranges 2 streams ");
}

/// The offer of a rank is checked: it may not be larger than its memory.
TEST(DeviceFaults, AnOfferOfMoreThanThereIsIsRefused) {
  const struct {
    const std::vector<ShareKind>& lacking;
    const char* reason;
  } kRows[] = {{kAll, "cuMemMap of"}, {kNoFabric, "cuMemMap of"}, {kIpcOnly, "it has 8388608 bytes instead of the"}};
  for (const auto& row : kRows) {
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      Process process(2);
      for (const ShareKind lack : row.lacking) process.driver->lacks(lack);
      SharedBootstrap honest(table, rank);
      FalseBootstrap bootstrap(honest, [&](int round, std::vector<std::byte>& text) {
        constexpr size_t kBytesAt = 43;  // the fourth byte of the size: 16 MiB more
        if (rank == 1 && round == 1) text[kBytesAt] ^= std::byte(1);
      });
      const Outcome outcome = try_to_share(*process.registry, bootstrap, options_of(rank, 2, rank));
      EXPECT_EQ(outcome.kind, kHost) << outcome.reason;
      EXPECT_NE(outcome.reason.find(row.reason), std::string::npos) << outcome.reason;
    });
  }
}

/// Calls back after each round.
class WatchedBootstrap : public Bootstrap {
 public:
  WatchedBootstrap(Bootstrap& real, std::function<void(int)> after) : real_(real), after_(std::move(after)) {}
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override {
    auto all = real_.all_gather(mine);
    after_(round_++);
    return all;
  }

 private:
  Bootstrap& real_;
  std::function<void(int)> after_;
  int round_ = 0;
};

/// Two groups of one process agree on different kinds at once, before its GPU has an arena: one of them gets its kind,
/// and the other uses pinned host memory, as if it had arrived later.
TEST(DeviceFaults, TwoGroupsThatAgreeOnDifferentKindsAtOnce) {
  for (int turn = 0; turn < int(as_fast(10, 4)); ++turn) {
    Process both(3), fabric(3), descriptor(3);
    descriptor.driver->lacks(kFabric);
    const SharedTable one(2), other(2);
    std::barrier agreed(2);
    std::array<Outcome, 4> outcomes;
    as_threads(4, [&](int thread) {
      const bool first = thread < 2;
      Process& process = thread % 2 == 0 ? both : first ? fabric : descriptor;
      const int rank = thread % 2;
      SharedBootstrap real(first ? one : other, rank);
      WatchedBootstrap bootstrap(real, [&](int round) {
        if (rank == 0 && round == 0) agreed.arrive_and_wait();
      });
      MappingOptions options = options_of(rank, 2, rank == 0 ? 0 : first ? 1 : 2);
      outcomes[size_t(thread)] = try_to_share(*process.registry, bootstrap, options);
    });
    EXPECT_EQ(outcomes[0].kind, outcomes[1].kind) << outcomes[0].reason << outcomes[1].reason;
    EXPECT_EQ(outcomes[2].kind, outcomes[3].kind) << outcomes[2].reason << outcomes[3].reason;
    const ShareKind made = both.registry->made(0)->region().kind();
    EXPECT_EQ(outcomes[0].kind, made == kFabric ? kFabric : kHost) << outcomes[0].reason;
    EXPECT_EQ(outcomes[2].kind, made == kFd ? kFd : kHost) << outcomes[2].reason;
    const Outcome& later = outcomes[made == kFabric ? 2 : 0];
    EXPECT_NE(later.reason.find("its memory was made before, for another group, by"), std::string::npos)
        << later.reason;
    for (Process* process : {&both, &fabric, &descriptor}) {
      EXPECT_EQ(process->registry->made(process == &both ? 0 : process == &fabric ? 1 : 2)->used(), 0u);
      EXPECT_EQ(process->driver->calls_of("pin") > 0, true);
    }
  }
}

}  // namespace
}  // namespace nvx::test
