// A group takes room in the arena for the ranks of its own host only, for any number of ranks elsewhere.

#include <gtest/gtest.h>

#include "support/hosts.h"

namespace nvx::test {
namespace {

/// A store in which all ranks but 0 have arrived, on another host. They exist only as addresses.
class Crowd : public MemoryStore {
 public:
  Crowd(int ranks, const std::vector<std::byte>& address) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(address.data());
    Hello hello = describe_self(1, "elsewhere");
    hello.ranks = uint32_t(ranks);
    for (int r = 1; r < ranks; ++r) {
      hello.rank = r;
      set("nvx/1/" + std::to_string(r), encode({&hello, 1}));
      set("nvx/1/address/" + std::to_string(r), {bytes, bytes + address.size()});
    }
  }
};

TEST(Pads, HaveRoomForTheRanksOfTheirHostOnly) {
  constexpr int kRanks = 1024;
  Hosts hosts({0, 1});
  Crowd store(kRanks, hosts.options("crowd", 1).messenger()->address());
  const auto shm = ShmRegistry::instance();
  Arena& arena = shm->arena();
  arena.free(arena.allocate(1));  // `allocate` collects memory that earlier groups have left
  const size_t before = arena.used();
  {
    GroupOptions own = hosts.options_of("crowd", 0, kRanks, 0);
    Group group(store, own);
    EXPECT_EQ(group.core().members.local_ranks(), 1);
    const size_t alone = kernel::PadLayout(1).bytes();
    EXPECT_GE(arena.used() - before, alone);
    EXPECT_LT(arena.used() - before, alone + kSpanPage);
    EXPECT_GT(kernel::PadLayout(kRanks).bytes(), 16 * alone);
  }
  EXPECT_EQ(arena.used(), before);
}

/// Spans of a GPU's memory are freed once the peers have gone, which may be after the last group of the process.
TEST(Pads, StayMappedForTheConditionsOfAGpu) {
  std::function<bool()> gone;
  std::weak_ptr<ShmRegistry> shm;
  {
    MemoryStore store;
    Group group(store, options("alone", 0, 1));
    gone = group.core().members.all_peers_gone_keeping_pads();
    shm = group.core().members.shm;
  }
  EXPECT_FALSE(shm.expired());
  EXPECT_TRUE(gone());
  gone = nullptr;
  EXPECT_TRUE(shm.expired());
}

/// A pad for all ranks would not fit into the arena. Which ranks are here shows only once they have arrived.
TEST(Pads, OfALargeWorldFitBeforeItsHostsAreKnown) {
  constexpr int kRanks = 100'000;
  MemoryStore store;
  GroupOptions own = options("large", 0, kRanks);
  own.timeout = std::chrono::milliseconds(50);
  try {
    Group group(store, own);
    ADD_FAILURE() << "the others have not arrived";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::kTimeout) << error.what();
  }
}

}  // namespace
}  // namespace nvx::test
