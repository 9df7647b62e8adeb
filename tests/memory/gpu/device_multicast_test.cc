// How ranks make a multicast object over fake drivers: they have one, or none of them has, and all know why.

#include "memory/gpu/device_multicast.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory/driver/device_driver.h"
#include "support/fake_driver.h"
#include "support/gpu_processes.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

constexpr int kRanks = 3;

/// One rank of a test, whose process has GPUs of its own driver.
struct Rank {
  Process process;
  SharedBootstrap bootstrap;
  std::unique_ptr<PeerMappings> mappings;
  std::unique_ptr<MulticastSpan> span;
  const int rank, ranks;

  Rank(const SharedTable& table, int rank)
      : process(table.ranks(), 16 * M), bootstrap(table, rank), rank(rank), ranks(table.ranks()) {}
  FakeDriver& driver() { return *process.driver; }

  void open(size_t bytes = 3 * M) {
    MappingOptions options = options_of(rank, ranks, rank);
    options.multicast_bytes = bytes;
    mappings = std::make_unique<PeerMappings>(*process.registry, bootstrap, options);
    span = mappings->take_multicast();
  }
  /// Frees everything, and returns the resources that the driver did not get back.
  std::string close() {
    span.reset();
    mappings.reset();
    (void)bootstrap.all_gather({});
    (void)eventually(milliseconds(10'000), [&] { return driver().unreleased().find("bound") == std::string::npos; });
    process.registry.reset();
    return unreleased_at_rest(driver());
  }
};

void all_ranks(int ranks, const std::function<void(Rank&)>& body) {
  const SharedTable table(ranks);
  as_threads(ranks, [&](int rank) {
    Rank one(table, rank);
    body(one);
  });
}

/// No rank has an object, all have the same reason, and their memory is shared as without.
void expect_none(Rank& one, const std::string& why) {
  EXPECT_EQ(one.span, nullptr);
  EXPECT_NE(one.mappings->why_no_multicast().find(why), std::string::npos) << one.mappings->why_no_multicast();
  const std::string& text = one.mappings->why_no_multicast();
  for (const auto& theirs : one.bootstrap.all_gather(std::as_bytes(std::span(text))))
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(theirs.data()), theirs.size()), text);
  write_and_look(*one.mappings, one.bootstrap, one.rank, one.ranks);
}

TEST(DeviceMulticast, OneAddressReachesAPartOfEachRank) {
  for (const bool by_fd : {false, true}) {
    all_ranks(kRanks, [&](Rank& one) {
      if (by_fd) one.driver().lacks(ShareKind::kFabric);
      if (by_fd) one.driver().set_multicast_granule(4 * M);
      one.open();
      ASSERT_NE(one.span, nullptr) << one.mappings->why_no_multicast();
      EXPECT_EQ(one.mappings->why_no_multicast(), "");
      EXPECT_EQ(one.span->bytes(), 4 * M) << "whole granules";
      std::memset(memory(one.span->mine()), one.rank + 1, one.span->bytes());
      (void)one.bootstrap.all_gather({});
      const size_t last = one.span->bytes() - 1;
      for (const size_t at : {size_t(0), last}) {
        const auto parts = one.driver().multicast(memory(one.span->all() + at));
        ASSERT_EQ(parts.size(), size_t(kRanks));
        for (int r = 0; r < kRanks; ++r) EXPECT_EQ(int(*parts[size_t(r)]), r + 1) << at;
      }
      write_and_look(*one.mappings, one.bootstrap, one.rank, kRanks);
      (void)one.bootstrap.all_gather({});
      EXPECT_EQ(one.close(), "");
    });
  }
}

TEST(DeviceMulticast, IsNotRequestedByDefault) {
  all_ranks(2, [](Rank& one) {
    one.open(0);
    EXPECT_EQ(one.span, nullptr);
    EXPECT_EQ(one.mappings->why_no_multicast(), "");
    EXPECT_EQ(one.driver().calls_of("multicast_granularity"), 0);
  });
}

/// The driver's name of each call, and how a refusal names it.
const std::pair<const char*, const char*> kCalls[] = {{"multicast_granularity", "cuMulticastGetGranularity on GPU"},
                                                      {"create_multicast", "cuMulticastCreate on GPU 0"},
                                                      {"join_multicast", "cuMulticastAddDevice on GPU"},
                                                      {"bind_multicast", "cuMulticastBindMem on GPU"}};

TEST(DeviceMulticast, WhereOneRankIsRefusedNoneHasIt) {
  for (const auto& [call, reason] : kCalls) {
    for (const int refused : {0, 2}) {
      if (std::string(call) == "create_multicast" && refused != 0) continue;
      all_ranks(kRanks, [&, call = call, reason = reason](Rank& one) {
        if (one.rank == refused) one.driver().refuse(call, 801);
        one.open();
        expect_none(one, "rank " + std::to_string(refused) + ": " + reason);
        expect_none(one, "fake refusal 801");
        EXPECT_EQ(one.close(), "") << call;
      });
    }
  }
}

/// Also where the call of one rank would make the calls of the others wait for it.
TEST(DeviceMulticast, WhereTheDriverOfOneRankHangsNoneHasItAndNoneWaitsLong) {
  for (const auto& [call, reason] : kCalls) {
    for (const int hangs : {0, 2}) {
      if (std::string(call) == "create_multicast" && hangs != 0) continue;
      all_ranks(kRanks, [&, call = call](Rank& one) {
        if (one.rank == hangs) one.driver().block(call);
        const auto began = Clock::now();
        one.open();
        EXPECT_LT(Clock::now() - began, std::chrono::seconds(15)) << call;
        expect_none(one, "rank " + std::to_string(hangs) + ": ");
        expect_none(one, "did not return within");
        const bool keeps = one.rank == hangs && std::string(call) == "bind_multicast";
        EXPECT_EQ(one.mappings->arena().used() > 0, keeps) << "memory that may yet be bound is not used again";
        (void)one.bootstrap.all_gather({});
        one.driver().unblock();
        (void)one.bootstrap.all_gather({});
        one.mappings.reset();
        (void)eventually(milliseconds(10'000),
                         [&] { return one.driver().unreleased().find("bound") == std::string::npos; });
        EXPECT_EQ(one.driver().unreleased().find("bound"), std::string::npos) << call;
      });
    }
  }
}

/// Every call of one rank's driver in these steps fails in turn.
TEST(DeviceMulticast, WhicheverCallFailsTheRanksAgreeAndEverythingIsReturned) {
  int before = 0, after = 0;
  all_ranks(2, [&](Rank& one) {
    one.open(0);
    if (one.rank == 1) before = one.driver().calls();
  });
  all_ranks(2, [&](Rank& one) {
    one.open();
    if (one.rank == 1) after = one.driver().calls();
  });
  ASSERT_GT(after, before + 8);
  int none = 0;
  for (int n = before; n < after; n += as_fast(1, 3)) {
    const SharedTable table(2);
    bool has[2] = {};
    as_threads(2, [&](int rank) {
      Rank one(table, rank);
      if (rank == 1) one.driver().fail_call(n);
      one.open();
      one.driver().fail_call(-1);
      has[rank] = one.span != nullptr;
      write_and_look(*one.mappings, one.bootstrap, rank, 2);
      if (one.driver().faulted_call() == "drained") return (void)one.bootstrap.all_gather({});  // the stream stays
      EXPECT_EQ(one.close(), "") << one.driver().faulted_call();
    });
    EXPECT_EQ(has[0], has[1]) << n;
    none += !has[0];
  }
  EXPECT_GT(none, as_fast(3, 1));
}

TEST(DeviceMulticast, GroupsThatCannotHaveItReportWhy) {
  all_ranks(2, [](Rank& one) {
    for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd}) one.driver().lacks(kind);
    one.open();
    expect_none(one, "the ranks do not share virtual memory, but memory by legacy IPC");
  });
  all_ranks(2, [](Rank& one) {
    one.driver().set_visible({5, 5});
    one.open();
    expect_none(one, "rank 0 and rank 1 share a GPU");
  });
  all_ranks(kRanks, [](Rank& one) {
    one.driver().pairs(1, 2, FakeDriver::PeerAccess::kRefuses);
    one.open();
    expect_none(one, "rank 1 and rank 2 do not reach each other's GPU memory");
  });
  all_ranks(2, [](Rank& one) {
    one.open(32 * M);
    expect_none(one, "the shared memory of GPU");
  });
}

TEST(DeviceMulticast, OnePartIsNotReleasedBeforeThePeersHaveGone) {
  all_ranks(2, [](Rank& one) {
    one.open();
    ASSERT_NE(one.span, nullptr);
    const auto gone = std::make_shared<std::atomic<bool>>(false);
    one.span->release_when([gone] { return gone->load(); });
    one.span.reset();
    one.mappings->arena().free(one.mappings->arena().allocate(1));
    EXPECT_NE(one.driver().unreleased().find("1 bound parts"), std::string::npos);
    *gone = true;
    one.mappings->arena().free(one.mappings->arena().allocate(1));
    EXPECT_EQ(one.mappings->arena().used(), 0u);
    EXPECT_EQ(one.close(), "");
  });
}

TEST(DeviceMulticast, DamagedTextOfAPeerIsRefused) {
  all_ranks(2, [](Rank& one) {
    FalseBootstrap bootstrap(one.bootstrap, [&](int, std::vector<std::byte>& text) {
      uint32_t magic = 0;
      if (text.size() >= sizeof magic) std::memcpy(&magic, text.data(), sizeof magic);
      if (one.rank == 1 && magic == 0x6d78766e) text[0] ^= std::byte{1};
    });
    MappingOptions options = options_of(one.rank, 2, one.rank);
    options.multicast_bytes = M;
    try {
      const PeerMappings mappings(*one.process.registry, bootstrap, options);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kMismatch) << error.what();
    }
  });
}

}  // namespace
}  // namespace nvx::test
