// How ranks share the memory of their GPUs, over a fake driver with several GPUs: each kind, each error, each false
// answer, and each call that fails.

#include "memory/gpu/peer_mappings.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "base/error.h"
#include "support/fake_driver.h"
#include "support/gpu_processes.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using PeerAccess = FakeDriver::PeerAccess;

DeviceInfo info(int rank, uint64_t home, std::initializer_list<ShareKind> kinds, uint64_t host = 7) {
  DeviceInfo info;
  info.rank = rank;
  info.host = host;
  info.process = {home, home};
  for (const ShareKind kind : kinds) info.kinds |= 1u << int(kind);
  for (auto& why : info.why_not) std::strcpy(why, "not today");
  return info;
}

TEST(PeerMappings, TheBestKindThatAllHaveIsAgreedOn) {
  using enum ShareKind;
  const struct {
    std::vector<DeviceInfo> infos;
    ShareKind kind;
    std::string why;
  } kTable[] = {
      {{info(0, 1, {kFabric, kFd, kIpc}), info(1, 2, {kFabric, kFd, kIpc})}, kFabric, ""},
      {{info(0, 1, {kFabric, kFd, kIpc}), info(1, 2, {kFd, kIpc})}, kFd, "no fabric handle: rank 1: not today"},
      {{info(0, 1, {kIpc}), info(1, 2, {kFd, kIpc})},
       kIpc,
       "no fabric handle: rank 0: not today; no file descriptor: rank 0: not today"},
      {{info(0, 1, {kFd, kHost}), info(1, 2, {kIpc, kHost})},
       kHost,
       "no fabric handle: rank 0: not today; no file descriptor: rank 1: not today; no legacy IPC: rank 0: not today"},
      {{info(0, 1, {}), info(1, 1, {})}, kPointer, ""},
      {{info(0, 1, {kFabric, kFd}), info(1, 2, {kFabric, kFd}, 8)}, kFabric, ""},
  };
  for (const auto& row : kTable) {
    const ShareAgreement agreed = agree_on_kind(row.infos);
    EXPECT_EQ(agreed.kind, row.kind) << name(row.kind);
    EXPECT_EQ(agreed.why_not_better, row.why);
  }
  try {
    (void)agree_on_kind(std::vector{info(0, 1, {kFd, kHost}), info(1, 2, {kFd, kHost}, 8)});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no file descriptor: the ranks are on several hosts"), std::string::npos)
        << error.what();
  }
}

TEST(PeerMappings, RanksOfOneProcessUsePointers) {
  constexpr int kRanks = 4;
  Process process(3);
  const SharedTable table(kRanks);
  as_threads(kRanks, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, kRanks, rank % 3));
    EXPECT_EQ(mappings.agreement().kind, ShareKind::kPointer);
    EXPECT_EQ(mappings.fallbacks(), "");
    write_and_look(mappings, bootstrap, rank, kRanks);
  });
  EXPECT_EQ(process.registry->made(0)->used(), 0u);
  EXPECT_TRUE(process.driver->unreleased().starts_with("3 memories 3 reservations 3 mappings "));
  process.registry.reset();
  EXPECT_EQ(unreleased_at_rest(*process.driver), "");
}

/// Two GPUs of one process that cannot access each other, and a third one that both can.
TEST(PeerMappings, RanksOfOneProcessFallBackByPair) {
  Process process(3);
  process.driver->pairs(0, 1, PeerAccess::kRefuses);
  const SharedTable table(3);
  as_threads(3, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    MappingOptions options = options_of(rank, 3, rank);
    options.name = [](int r) { return "rank " + std::to_string(r + 40); };
    const PeerMappings mappings(*process.registry, bootstrap, options);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(mappings.peer(r).kind, r + rank == 1 ? ShareKind::kHost : ShareKind::kPointer) << rank << r;
    }
    EXPECT_EQ(mappings.fallbacks().find("the driver reports that GPU 0 cannot access GPU 1") != std::string::npos,
              rank < 2);
    EXPECT_EQ(mappings.fallbacks().starts_with("rank 41 is reached through"), rank == 0) << mappings.fallbacks();
    EXPECT_EQ(mappings.fallbacks().starts_with("rank 40 is reached through"), rank == 1) << mappings.fallbacks();
    write_and_look(mappings, bootstrap, rank, 3);
  });
  process.registry.reset();
  EXPECT_EQ(unreleased_at_rest(*process.driver), "");
}

/// A third rank, in another process, can share host memory only. This affects only the pairs between the processes.
TEST(PeerMappings, RanksOfOneProcessKeepPointersWhateverOthersLack) {
  Process both(2), other(3);
  for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}) other.driver->lacks(kind);
  const SharedTable table(3);
  as_threads(3, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    const PeerMappings mappings(*(rank < 2 ? both : other).registry, bootstrap, options_of(rank, 3, rank));
    EXPECT_EQ(mappings.agreement().kind, ShareKind::kHost);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(mappings.peer(r).kind, (r < 2) == (rank < 2) ? ShareKind::kPointer : ShareKind::kHost) << rank << r;
    }
    if (rank < 2) {
      EXPECT_EQ(mappings.peer(1 - rank).theirs, both.registry->made(1 - rank)->region().base());
    }
    write_and_look(mappings, bootstrap, rank, 3);
  });
}

/// A pair that corrupted data is not tried again, and costs no memory. Its fallback works each time.
TEST(PeerMappings, RanksOfOneProcessReplaceAPairThatCorrupts) {
  Process process(2);
  process.driver->pairs(0, 1, PeerAccess::kCorrupts);
  const SharedTable table(2);
  std::array<size_t, 2> used{};
  as_threads(2, [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    for (int time = 0; time < 3; ++time) {
      {
        const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
        EXPECT_EQ(mappings.peer(1 - rank).kind, ShareKind::kHost) << mappings.fallbacks();
        write_and_look(mappings, bootstrap, rank, 2);
      }
      (void)bootstrap.all_gather({});
      if (time == 1) used[size_t(rank)] = process.registry->made(rank)->used();
    }
    EXPECT_EQ(process.registry->made(rank)->used(), used[size_t(rank)]);
  });
}

/// One rank is enough.
TEST(PeerMappings, OneRankHasItselfAlone) {
  Process process(1);
  const SharedTable table(1);
  SharedBootstrap bootstrap(table, 0);
  const PeerMappings mappings(*process.registry, bootstrap, options_of(0, 1, 0));
  EXPECT_EQ(mappings.peer(0).theirs, mappings.peer(0).mine);
  write_and_look(mappings, bootstrap, 0, 1);
}

/// The kinds that a machine lacks, and the kind that remains.
const std::pair<std::vector<ShareKind>, ShareKind> kLacking[] = {
    {{}, ShareKind::kFabric},
    {{ShareKind::kFabric}, ShareKind::kFd},
    {{ShareKind::kFabric, ShareKind::kFd}, ShareKind::kIpc},
    {{ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}, ShareKind::kHost},
};

void share_once(const SharedTable& table, int rank, const std::vector<ShareKind>& lacking, ShareKind kind) {
  const int ranks = table.ranks();
  Process process(ranks);
  for (const ShareKind lack : lacking) process.driver->lacks(lack);
  SharedBootstrap bootstrap(table, rank);
  {
    const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, ranks, rank));
    EXPECT_EQ(mappings.agreement().kind, kind) << mappings.agreement().why_not_better;
    EXPECT_EQ(mappings.fallbacks().empty(), kind != ShareKind::kHost) << mappings.fallbacks();
    for (int r = 0; r < ranks; ++r) EXPECT_EQ(mappings.peer(r).kind, r == rank ? ShareKind::kPointer : kind);
    write_and_look(mappings, bootstrap, rank, ranks);
  }
  EXPECT_EQ(process.registry->made(rank)->used(), 0u);
  (void)bootstrap.all_gather({});
  process.registry.reset();
  EXPECT_EQ(unreleased_at_rest(*process.driver), "");
}

TEST(PeerMappings, EachKindWorksBetweenProcesses) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  for (const auto& [lacking, kind] : kLacking) {
    const SharedTable table(3);
    all_end_well(3, [&, &lacking = lacking, kind = kind](int rank) { share_once(table, rank, lacking, kind); });
  }
}

TEST(PeerMappings, EachKindWorksBetweenThreadsWithDriversOfTheirOwn) {
  for (const auto& [lacking, kind] : kLacking) {
    const int before = open_fds();
    const SharedTable table(3);
    as_threads(3, [&, &lacking = lacking, kind = kind](int rank) { share_once(table, rank, lacking, kind); });
    EXPECT_EQ(open_fds(), before);
  }
}

/// Several ranks on one GPU reach each other, whatever the pairs of GPUs can do.
TEST(PeerMappings, SeveralRanksShareOneGpu) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const SharedTable table(4);
  all_end_well(4, [&](int rank) {
    Process process(2);
    process.driver->pairs(0, 1, PeerAccess::kRefuses);
    SharedBootstrap bootstrap(table, rank);
    const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 4, rank / 2));
    for (int r = 0; r < 4; ++r) {
      const ShareKind expected = r == rank           ? ShareKind::kPointer
                                 : r / 2 == rank / 2 ? ShareKind::kFabric
                                                     : ShareKind::kHost;
      EXPECT_EQ(mappings.peer(r).kind, expected) << r << ": " << mappings.peer(r).why_not_better;
      EXPECT_EQ(mappings.peer(r).same_gpu, r / 2 == rank / 2);
    }
    write_and_look(mappings, bootstrap, rank, 4);
  });
}

struct AccessCase {
  const char* name;
  PeerAccess access;  ///< of 0 to 2
  PeerAccess back;
  const char* reason;
  bool has(PeerAccess what) const { return access == what || back == what; }
};

const AccessCase kAccessCases[] = {
    {"refuses", PeerAccess::kRefuses, PeerAccess::kRefuses, "fake refusal 217"},
    {"hangs", PeerAccess::kHangs, PeerAccess::kHangs, "did not end within"},
    {"blocks", PeerAccess::kBlocks, PeerAccess::kBlocks, "a driver call did not return within"},
    {"corrupts", PeerAccess::kCorrupts, PeerAccess::kCorrupts, "the data read differs at byte 32768"},
    {"corrupts what is written", PeerAccess::kCorruptsWrites, PeerAccess::kWorks,
     "rank 2 with the data from rank 0: the data read differs"},
    {"refuses one way", PeerAccess::kRefuses, PeerAccess::kWorks, "rank 0 with the memory of rank 2"},
    {"hangs one way", PeerAccess::kHangs, PeerAccess::kWorks, "rank 0 with the memory of rank 2"},
    {"corrupts one way", PeerAccess::kCorrupts, PeerAccess::kWorks, "rank 0 with the memory of rank 2"},
    {"refuses one way, hangs the other", PeerAccess::kRefuses, PeerAccess::kHangs, "rank 0 with the memory of rank 2"},
    {"corrupts one way, blocks the other", PeerAccess::kCorrupts, PeerAccess::kBlocks,
     "rank 0 with the memory of rank 2"},
};

/// Between GPUs 0 and 2 access fails in some way; the other pairs are not affected.
TEST(PeerMappings, ACorruptPairFallsBackToPinnedHostMemoryAndReportsWhy) {
  for (const AccessCase& row : kAccessCases) {
    const SharedTable table(3);
    std::vector<std::shared_ptr<FakeDriver>> drivers(3);
    as_threads(3, [&](int rank) {
      Process process(3);
      drivers[size_t(rank)] = process.driver;
      process.driver->pair(0, 2, row.access);
      process.driver->pair(2, 0, row.back);
      SharedBootstrap bootstrap(table, rank);
      const auto began = Clock::now();
      const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 3, rank));
      EXPECT_LT(Clock::now() - began, std::chrono::seconds(20)) << row.name;
      for (int r = 0; r < 3; ++r) {
        const bool odd = (rank == 0 && r == 2) || (rank == 2 && r == 0);
        const ShareKind expected = r == rank ? ShareKind::kPointer : odd ? ShareKind::kHost : ShareKind::kFabric;
        EXPECT_EQ(mappings.peer(r).kind, expected) << row.name << " " << rank << r;
        EXPECT_EQ(!mappings.peer(r).why_not_better.empty(), odd) << row.name;
        if (odd) {
          EXPECT_NE(mappings.fallbacks().find(row.reason), std::string::npos) << mappings.fallbacks();
        }
      }
      write_and_look(mappings, bootstrap, rank, 3);
      // Memory that a hanging copy may still write is not allocated again.
      const bool hangs = row.has(PeerAccess::kHangs) || row.has(PeerAccess::kBlocks);
      EXPECT_EQ(mappings.arena().used() > 0, hangs && rank != 1) << row.name << rank;
      // Another group of the same processes does not try again.
      const PeerMappings second(*process.registry, bootstrap, options_of(rank, 3, rank));
      EXPECT_EQ(second.fallbacks().find("found by an earlier group") != std::string::npos,
                rank != 1 && row.access != PeerAccess::kRefuses && row.access != PeerAccess::kCorruptsWrites)
          << row.name << rank << second.fallbacks();
      EXPECT_EQ(second.peer((rank + 1) % 3).kind, mappings.peer((rank + 1) % 3).kind);
      (void)bootstrap.all_gather({});
      process.driver->unblock();
    });
    for (const auto& driver : drivers) {
      // The blocked calls return at last, and return their resources.
      EXPECT_TRUE(eventually(
          milliseconds(10'000),
          [&] { return row.has(PeerAccess::kHangs) || driver->unreleased().find("streams") == std::string::npos; }))
          << row.name << driver->unreleased();
      if (!row.has(PeerAccess::kHangs) && !row.has(PeerAccess::kBlocks)) {
        EXPECT_EQ(unreleased_at_rest(*driver), "") << row.name;
      }
    }
  }
}

TEST(PeerMappings, WhereNeitherWorksAllRanksReportIt) {
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    Process process(2);
    process.driver->pairs(0, 1, PeerAccess::kRefuses);
    if (rank == 1) process.driver->lacks(ShareKind::kHost), process.driver->refuse("pin", 712);
    SharedBootstrap bootstrap(table, rank);
    try {
      const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("fake refusal 712"), std::string::npos) << error.what();
    }
    process.registry.reset();
    EXPECT_EQ(unreleased_at_rest(*process.driver), "");
  });
}

/// Every call of one rank's driver fails in turn: all ranks end alike, all resources are returned unless a device may
/// still write, and the same processes can then create mappings.
TEST(PeerMappings, WhicheverCallFailsEverythingIsReturned) {
  for (const auto& [lacking, kind] : kLacking) {
    int failed = 0, fell_back = 0;
    for (int n = 0;; n += as_fast(1, 7)) {
      const int before = open_fds();
      bool made[2] = {}, reached_call[2] = {true, true};
      std::shared_ptr<FakeDriver> drivers[2];
      {
        const SharedTable table(2);
        as_threads(2, [&, &lacking = lacking, kind = kind](int rank) {
          Process process(2, 4 * M);
          drivers[rank] = process.driver;
          for (const ShareKind lack : lacking) process.driver->lacks(lack);
          if (rank == 1) process.driver->fail_call(n);
          SharedBootstrap bootstrap(table, rank);
          try {
            const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
            made[rank] = true;
            if (rank == 1 && !mappings.fallbacks().empty()) ++fell_back;
            reached_call[rank] = process.driver->calls() > n;
            process.driver->fail_call(-1);
            write_and_look(mappings, bootstrap, rank, 2);
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(error.code() == Code::kPeerFailed ? "rank 1" : "fake refusal 999"),
                      std::string::npos)
                << error.what();
          }
          process.driver->fail_call(-1);
          try {
            const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
            (void)bootstrap.all_gather({});
          } catch (const Error& error) {  // the only way may hang
            EXPECT_EQ(kind, ShareKind::kHost);
            EXPECT_NE(std::string(error.what()).find("found by an earlier group"), std::string::npos) << error.what();
          }
        });
      }
      EXPECT_EQ(made[0], made[1]) << "call " << n;
      failed += !made[1];
      const std::string faulted = drivers[1]->faulted_call();
      const std::string row = "call " + std::to_string(n) + ", " + faulted + ", " + name(kind);
      if (faulted == "drained") {  // work that was begun may continue
        EXPECT_NE(drivers[1]->unreleased().find("1 streams"), std::string::npos) << row;
      } else {
        for (const auto& driver : drivers) EXPECT_EQ(unreleased_at_rest(*driver), "") << row;
        EXPECT_EQ(open_fds(), before) << row;
      }
      if (!reached_call[1] || HasFailure()) break;
    }
    EXPECT_GT(failed, 0);
    EXPECT_GT(fell_back, 0) << name(kind);
  }
}

TEST(PeerMappings, AnArenaIsMadeOnceForAllGroups) {
  const SharedTable table(2);
  as_threads(2, [&](int rank) {
    Process process(2);
    SharedBootstrap bootstrap(table, rank);
    const auto options = options_of(rank, 2, rank);
    const PeerMappings first(*process.registry, bootstrap, options);
    const int created = process.driver->calls_of("create"), imported = process.driver->calls_of("import_fabric");
    const PeerMappings second(*process.registry, bootstrap, options);
    EXPECT_EQ(&first.arena(), &second.arena());
    EXPECT_EQ(first.peer(1 - rank).theirs, second.peer(1 - rank).theirs);
    EXPECT_EQ(process.driver->calls_of("create"), created) << "neither to probe nor for an arena";
    EXPECT_EQ(process.driver->calls_of("import_fabric"), imported) << "neither to probe nor for the other's arena";
    (void)bootstrap.all_gather({});
  });
}

/// A group of one process comes first; members of later groups can map its memory.
TEST(PeerMappings, ProcessThatWasAloneFirstIsMapped) {
  const struct {
    std::vector<ShareKind> lacking;
    ShareKind kind;
  } kRows[] = {{{}, ShareKind::kFd},
               {{ShareKind::kFd}, ShareKind::kFabric},
               {{ShareKind::kFd, ShareKind::kFabric}, ShareKind::kIpc}};
  for (const auto& row : kRows) {
    const SharedTable own[2] = {SharedTable(1), SharedTable(1)};
    const SharedTable both(2);
    as_threads(2, [&](int rank) {
      Process process(2);
      for (const ShareKind lack : row.lacking) process.driver->lacks(lack);
      SharedBootstrap alone(own[rank], 0), bootstrap(both, rank);
      const PeerMappings first(*process.registry, alone, options_of(0, 1, rank));
      EXPECT_EQ(first.agreement().kind, ShareKind::kPointer);
      const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
      EXPECT_EQ(mappings.agreement().kind, row.kind) << mappings.agreement().why_not_better;
      EXPECT_EQ(&mappings.arena(), &first.arena());
      write_and_look(mappings, bootstrap, rank, 2);
    });
  }
}

/// A third rank cannot export the kind of the first two ranks' arenas.
TEST(PeerMappings, LaterProcessWithoutTheKindUsesHostMemory) {
  const SharedTable pair(2), three(3);
  as_threads(3, [&](int rank) {
    Process process(3);
    if (rank == 2) process.driver->lacks(ShareKind::kFabric);
    SharedBootstrap all(three, rank);
    std::optional<PeerMappings> first;
    if (rank < 2) {
      SharedBootstrap two(pair, rank);
      first.emplace(*process.registry, two, options_of(rank, 2, rank));
      EXPECT_EQ(first->agreement().kind, ShareKind::kFabric);
    }
    const PeerMappings mappings(*process.registry, all, options_of(rank, 3, rank));
    EXPECT_EQ(mappings.agreement().kind, ShareKind::kHost);
    EXPECT_NE(mappings.fallbacks().find("made before, for another group, by fabric handle"), std::string::npos)
        << mappings.fallbacks();
    write_and_look(mappings, all, rank, 3);
  });
}

TEST(PeerMappings, MalformedDescriptionsOfPeersAreRefused) {
  const struct {
    int round;
    size_t byte, bytes;
    const char* reason;
  } kSpoilt[] = {
      {0, 0, 1, "describes its GPU in the format of another version of nvx"},
      {0, 4, 1, "describes its GPU in the format of another version of nvx"},
      {0, 100, 0, "is damaged"},
      {1, 0, 1, "an invalid description of its GPU memory"},
      {1, 12, 1, "an invalid description of its GPU memory"},
      {1, 45, 3, "an invalid description of its GPU memory"},
      {1, 53, 3, "an invalid description of its GPU memory"},
      {2, 7, 0, "is damaged"},
  };
  for (const auto& spoilt : kSpoilt) {
    const SharedTable table(2);
    as_threads(2, [&](int rank) {
      Process process(2);
      SharedBootstrap honest(table, rank);
      FalseBootstrap bootstrap(honest, [&](int round, std::vector<std::byte>& text) {
        if (rank == 0 || round != spoilt.round) return;
        if (spoilt.bytes == 0) return text.resize(spoilt.byte);
        for (size_t i = 0; i < spoilt.bytes; ++i) text[spoilt.byte + i] ^= std::byte(0x7f);
      });
      try {
        const PeerMappings mappings(*process.registry, bootstrap, options_of(rank, 2, rank));
        ADD_FAILURE() << spoilt.round << " " << spoilt.byte;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::kMismatch);
        EXPECT_NE(std::string(error.what()).find(spoilt.reason), std::string::npos) << error.what();
      }
    });
  }
}

TEST(DeviceArena, SpansAreZeroed) {
  Process process(1, 4 * M);
  DeviceArena& arena = process.registry->arena(0, ShareKind::kFd);
  const Span span = arena.allocate(M);
  std::memset(memory(arena.at(span.offset)), 0xff, span.bytes);
  arena.free(span);
  const Span again = arena.allocate(M);
  EXPECT_EQ(again.offset, span.offset);
  for (size_t i = 0; i < again.bytes; i += 511) ASSERT_EQ(*memory(arena.at(again.offset + i)), std::byte(0));
  arena.free(again);
  EXPECT_THROW((void)arena.allocate(5 * M), Error);
  arena.quarantine(arena.allocate(3 * M));
  EXPECT_THROW((void)arena.allocate(2 * M), Error) << "what is quarantined stays so";
}

TEST(DeviceArena, ADeviceThatRefusesToFillCostsNoMemory) {
  Process process(1, 4 * M);
  DeviceArena& arena = process.registry->arena(0, ShareKind::kIpc);
  process.driver->refuse("fill", 700);
  EXPECT_THROW((void)arena.allocate(M), Error);
  process.driver->refuse("fill", 0);
  EXPECT_EQ(arena.used(), 0u);
  EXPECT_EQ(arena.allocate(4 * M).bytes, 4 * M);
}

/// Without a driver, every call reports it.
TEST(DeviceArena, TheProcessHasOneRegistryIfThereIsADriver) {
  for (int turn = 0; turn < 2; ++turn) {
    try {
      EXPECT_EQ(&DeviceRegistry::instance(), &DeviceRegistry::instance());
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("NVIDIA driver"), std::string::npos) << error.what();
    }
  }
}

TEST(DeviceArena, TheMemoryOfAllGroupsIsBounded) {
  Process process(2, DeviceRegistry::kArenaBytes);
  EXPECT_EQ(process.registry->arena(1, ShareKind::kFd).region().bytes(), size_t(80) << 20);
}

TEST(DeviceArena, MessagesTakeNothingFromGroups) {
  Process process(1, DeviceRegistry::kArenaBytes);
  DeviceArena& arena = process.registry->arena(0, ShareKind::kFd);
  const Span slots = arena.messages().find(DeviceArena::kForMessages);
  EXPECT_TRUE(slots);
  EXPECT_FALSE(arena.messages().find(1));
  EXPECT_EQ(arena.room(), 64 * M);
  const Span rest = arena.allocate(64 * M);
  EXPECT_EQ(arena.room(), 0u);
  EXPECT_TRUE(rest.offset >= slots.offset + slots.bytes || slots.offset >= rest.offset + rest.bytes);
}

}  // namespace
}  // namespace nvx::test
