// One rank of each host reads the store for all ranks of that host.

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "memory/shm/host_relay.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

/// Counts the reads of each key. `delay`: how long a read of the table or of the addresses takes.
class CountingStore : public MemoryStore {
 public:
  explicit CountingStore(milliseconds delay = milliseconds(0)) : delay_(delay) {}
  std::optional<std::vector<uint8_t>> get(const std::string& key, milliseconds span) override {
    auto value = MemoryStore::get(key, span);
    if (!value) return value;
    if (key == "nvx/1/table" || key == "nvx/1/addresses") std::this_thread::sleep_for(delay_);
    std::lock_guard<std::mutex> lock(counting_);
    ++reads_[key];
    return value;
  }
  int reads(const std::string& key) {
    std::lock_guard<std::mutex> lock(counting_);
    return reads_[key];
  }

 private:
  const milliseconds delay_;
  std::mutex counting_;
  std::map<std::string, int> reads_;
};

const std::vector<int> kThreeHosts{0, 0, 0, 1, 1, 1, 2, 2};

TEST(SharedReads, AreOneAHost) {
  Hosts hosts(kThreeHosts);
  CountingStore store;
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("shared", rank));
    Spec spec{.collective = kernel::Collective::kAllReduce, .dtype = DType::kI32, .counts = {1000}};
    ASSERT_EQ(perform(group, spec), "");
    ASSERT_TRUE(barrier(group).ok());
  });
  for (const char* key : {"nvx/1/table", "nvx/1/addresses"}) {
    EXPECT_LE(store.reads(key), 3) << key;  // rank 0, which wrote it, may be the one of its host
    EXPECT_GE(store.reads(key), 2) << key;
  }
}

/// The leader of the second host reads for longer than the slice after which rank 3 checks its peers.
TEST(SharedReads, AreOneAHostAlsoIfTheyTakeLong) {
  Hosts hosts({0, 0, 1, 1});
  CountingStore store(milliseconds(200));
  as_threads(hosts.ranks(), [&](int rank) {
    const int leader = rank / 2 * 2;
    if (rank != leader) (void)store.MemoryStore::get(key_in(1, std::to_string(leader)), milliseconds(20'000));
    Group group(store, hosts.options("slow", rank));
    EXPECT_TRUE(barrier(group).ok());
  });
  for (const char* key : {"nvx/1/table", "nvx/1/addresses"}) EXPECT_EQ(store.reads(key), 1) << key;
}

/// A leader that has gone away before the others arrived must have ended, or the store holds its reason.
TEST(SharedReads, AReaderThatIsGoneIsNamed) {
  CountingStore store;
  const Hello self = describe_self(0, "host");
  const std::string place = "nvx/1/host/" + std::to_string(self.host) + "/" + std::to_string(self.machine) + "/3";
  store.add(place + "/asked", 1);
  const PeerInfo info = PeerInfo::of(2, "rank 2 (pid 4711, host host)");
  std::vector<uint8_t> lead(sizeof info + 48);
  std::memcpy(lead.data(), &info, sizeof info);
  std::memcpy(lead.data() + sizeof info, "nobody", 6);
  store.set(place, lead);
  as_threads(2, [&](int rank) {
    GroupOptions o = options("gone", rank, 3);
    o.host = "host";
    const std::string error = set_up_error(store, o);
    EXPECT_NE(error.find("rank 2 (pid 4711, host host) has ended while group gone was being created"),
              std::string::npos)
        << error;
  });
}

TEST(HostRelay, GivesItsRecordsInTheirOrderAlsoToThoseWhoComeLate) {
  const std::vector<uint8_t> first(300'000, 7), second{}, third{1, 2, 3};
  HostRelay relay(PeerInfo::of(0, "rank 0"));
  RelayClient early(relay.name(), PeerInfo::of(1, "rank 1"));
  EXPECT_FALSE(early.next(milliseconds(1)));
  EXPECT_TRUE(early.open());
  relay.publish(first);
  relay.publish(second);
  RelayClient late(relay.name(), PeerInfo::of(2, "rank 2"));
  relay.serve();
  relay.publish(third);
  for (RelayClient* client : {&early, &late}) {
    for (const auto* record : {&first, &second, &third}) EXPECT_EQ(client->next(milliseconds(1000)), *record);
    EXPECT_FALSE(client->next(milliseconds(1)));
    EXPECT_TRUE(client->open());
  }
}

TEST(HostRelay, IsMissedWhenItIsGone) {
  auto relay = std::make_unique<HostRelay>(PeerInfo::of(0, "rank 0"));
  const PeerInfo own = PeerInfo::of(1, "rank 1");
  RelayClient client(relay->name(), own), nobody("nvx-nobody", own);
  relay->publish(std::vector<uint8_t>{5});
  relay.reset();
  EXPECT_EQ(client.next(milliseconds(1000)), std::vector<uint8_t>{5});
  EXPECT_FALSE(client.next(milliseconds(1000)));
  EXPECT_FALSE(client.open());
  EXPECT_FALSE(nobody.open());
}

TEST(HostRelay, ListsItsClientsAndSendsTheReasonWhenItGivesUp) {
  HostRelay relay(PeerInfo::of(0, "rank 0"));
  auto client = std::make_unique<RelayClient>(relay.name(), PeerInfo::of(1, "rank 1"));
  relay.serve();
  ASSERT_EQ(relay.peers().size(), 1u);
  EXPECT_EQ(relay.peers().front().info.rank, 1);
  EXPECT_STREQ(relay.peers().front().info.description, "rank 1");
  relay.give_up(std::vector<uint8_t>{9});
  EXPECT_FALSE(client->next(milliseconds(1000)));
  EXPECT_FALSE(client->open());
  EXPECT_EQ(client->reason(), std::vector<uint8_t>{9});
  EXPECT_FALSE(relay.has_lost_clients());
  client.reset();
  relay.serve();
  EXPECT_TRUE(relay.has_lost_clients());
  EXPECT_FALSE(relay.has_lost_clients());
}

/// On a busy host the leader may be late: the PeerInfo has arrived, and the answer cannot be sent.
TEST(HostRelay, ListsAClientThatWasGoneBeforeItServed) {
  HostRelay relay(PeerInfo::of(0, "rank 0"));
  { const RelayClient gone(relay.name(), PeerInfo::of(1, "rank 1")); }
  for (int i = 0; i < 2; ++i) relay.serve();
  ASSERT_EQ(relay.peers().size(), 1u);
  EXPECT_EQ(relay.peers().front().info.rank, 1);
  EXPECT_TRUE(relay.has_lost_clients());
}

}  // namespace
}  // namespace nvx::test
