// All-reduces over several hosts whose steps inside a host are not the channel's: what a relay is asked for, in which
// order, and that the bits are those of the channel.

#include "group/relay.h"

#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cstring>
#include <random>
#include <span>

#include "group/chunks.h"
#include "kernel/level.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::Piece;

/// The ranks of one host, as threads that read each other's memory where it is.
struct Room {
  explicit Room(size_t seats) : meet(std::ptrdiff_t(seats)), steps(seats) {}
  std::barrier<> meet;
  std::vector<const Operation*> steps;  // by seat: what each is at
};

/// Does each step at once, and keeps parts on their way for a few looks.
class RoomRelay final : public Relay {
 public:
  RoomRelay(Room& room, size_t seat) : room_(room), seat_(seat) {}

  Status begin(size_t bytes) override {
    for (auto& slot : slots_) slot.resize(bytes);
    return {};
  }
  Status set_out(size_t k, const Operation& sum, Piece part) override {
    EXPECT_EQ(sum.collective, Collective::kReduceScatter);
    EXPECT_EQ(k, set_out_++);
    EXPECT_LT(k, home_ + kSlots) << "its memory is still in use";
    EXPECT_EQ(part.data, sum.out);
    std::vector<std::byte> result(part.bytes);
    together(sum, [&] {
      std::vector<const void*> terms;
      std::vector<double> factors;
      for (const Operation* step : room_.steps) {
        terms.push_back(step->send[seat_].data);
        factors.push_back(step->factor);
        EXPECT_EQ(step->send[seat_].bytes, part.bytes);
      }
      if (part.bytes != 0)
        kernel::level().reduce(sum.dtype, sum.op)(result.data(), terms.data(), terms.size(),
                                                  part.bytes / size_of(sum.dtype), factors.data());
    });
    if (part.bytes == 0) return {};
    std::memcpy(part.data, result.data(), part.bytes);
    std::memcpy(slots_[k % kSlots].data(), result.data(), part.bytes);
    return {};
  }
  Status arrive(size_t k, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    EXPECT_LT(k, set_out_);
    EXPECT_FALSE(deadline.passed(Clock::now()));
    for (size_t looks = 0; looks < k % 3; ++looks) meanwhile();
    return {};
  }
  std::byte* at(size_t k) override { return slots_[k % kSlots].data(); }
  Status come_home(size_t k, Piece part, const Operation& tell) override {
    EXPECT_EQ(tell.collective, Collective::kAllGather);
    EXPECT_EQ(k, home_++);
    if (part.bytes != 0) std::memcpy(part.data, at(k), part.bytes);
    together(tell, [&] {
      for (size_t s = 0; s < room_.steps.size(); ++s) {
        if (s == seat_ || tell.recv[s].bytes == 0) continue;
        EXPECT_EQ(room_.steps[s]->recv[s].bytes, tell.recv[s].bytes);
        std::memcpy(tell.recv[s].data, room_.steps[s]->in, tell.recv[s].bytes);
      }
    });
    return {};
  }
  Status end() override {
    EXPECT_EQ(set_out_, home_);
    ended_ = true;
    return {};
  }
  size_t slices() const { return home_; }
  bool ended() const { return ended_; }

 private:
  void together(const Operation& step, const std::function<void()>& act) {
    room_.steps[seat_] = &step;
    room_.meet.arrive_and_wait();
    act();
    room_.meet.arrive_and_wait();
  }

  Room& room_;
  const size_t seat_;
  std::array<std::vector<std::byte>, kSlots> slots_;
  size_t set_out_ = 0, home_ = 0;
  bool ended_ = false;
};

struct Sum {
  DType dtype;
  ReduceOp op;
};

Operation all_reduce(std::vector<float>& data, size_t count, const Sum& sum, int rank) {
  Operation o;
  o.collective = Collective::kAllReduce;
  o.dtype = sum.dtype, o.op = sum.op;
  o.factor = 0.5 + rank;
  o.count = count;
  o.in = o.out = reinterpret_cast<std::byte*>(data.data());
  return o;
}

TEST(Relay, GivesTheBitsOfTheChannel) {
  const size_t count = as_fast(1'700'001, 500'001);
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1}}) {
    Hosts hosts(host_of);
    MemoryStore store;
    std::vector<std::unique_ptr<Room>> rooms;
    for (int h = 0; h <= 2; ++h)
      rooms.push_back(std::make_unique<Room>(size_t(std::max<std::ptrdiff_t>(1, std::ranges::count(host_of, h)))));
    as_threads(hosts.ranks(), [&](int rank) {
      Group group(store, hosts.options("relay", rank));
      const std::array all{Sum{DType::kF32, ReduceOp::kAvg}, Sum{DType::kF32, ReduceOp::kSum},
                           Sum{DType::kF32, ReduceOp::kPremulSum}, Sum{DType::kI32, ReduceOp::kBxor}};
      for (const Sum sum : std::span(all).first(hosts.ranks() == 4 ? all.size() : as_fast(all.size(), 1))) {
        std::vector<float> mine(count);
        std::minstd_rand random(unsigned(rank) + 1);
        for (float& x : mine) x = float(random()) / float(1 << 20);
        std::vector<float> want = mine;
        Operation plain = all_reduce(want, count, sum, rank), relayed = all_reduce(mine, count, sum, rank);
        ASSERT_TRUE(group.execute(plain).ok());
        RoomRelay relay(*rooms[size_t(host_of[size_t(rank)])], size_t(group.seat()));
        relayed.relay = &relay;
        ASSERT_TRUE(group.execute(relayed).ok());
        EXPECT_EQ(std::memcmp(mine.data(), want.data(), count * sizeof(float)), 0);
        const Bridge bridge = plan_between(schedule::Collective::kAllReduce, count * 4, group.plan_facts());
        EXPECT_EQ(relay.slices(), (count * 4 + bridge.slice - 1) / bridge.slice);
        EXPECT_TRUE(relay.ended());
      }
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

/// Ranks that call different things are told before anything is begun.
TEST(Relay, IsNotAskedWhereRanksCallDifferentThings) {
  Hosts hosts({0, 0, 1, 1});
  MemoryStore store;
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("relay", rank));
    Room room(1);
    RoomRelay relay(room, 0);
    std::vector<float> data(100'000);
    Operation o = all_reduce(data, rank == 2 ? 99'999 : 100'000, {DType::kF32, ReduceOp::kSum}, rank);
    o.relay = &relay;
    const Status status = group.execute(o);
    EXPECT_EQ(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed, true) << status.what();
    EXPECT_EQ(relay.slices(), 0u);
  });
}

TEST(Relay, ServesLargeSumsOfSeveralRanksOnEachOfSeveralHosts) {
  PlanFacts facts;
  facts.ranks = facts.rails = 4, facts.hosts = 2, facts.world = 8;
  const auto why_not = [&](Collective collective, DType dtype, size_t count) {
    const char* why = why_not_relayed(collective, dtype, count, facts);
    return std::string_view(why ? why : "");
  };
  const size_t large = kChunk / 4 + 1;
  EXPECT_EQ(why_not(Collective::kAllReduce, DType::kF32, large), "");
  EXPECT_TRUE(why_not(Collective::kAllReduce, DType::kF32, large - 1).starts_with("small"));
  EXPECT_TRUE(why_not(Collective::kAllReduce, DType::kF16, large).starts_with("small")) << "half of the bytes";
  EXPECT_TRUE(why_not(Collective::kAllGather, DType::kF32, large).starts_with("all_reduce is"));
  facts.rails = 1;
  EXPECT_NE(why_not(Collective::kAllReduce, DType::kF32, large), "") << "a rank that is alone on its host";
  facts.ranks = 4, facts.rails = 4, facts.hosts = 1, facts.world = 4;
  EXPECT_EQ(why_not(Collective::kAllReduce, DType::kF32, large), "the ranks are on one host");
}

/// Its steps inside a host are those of rails.
TEST(Relay, IsForPlansWithRailsOnly) {
  for (const size_t ranks : {2, 3, 8, 64}) {
    for (const size_t hosts : {2, 5, 100}) {
      PlanFacts facts;
      facts.ranks = facts.rails = ranks, facts.hosts = hosts, facts.world = ranks * hosts;
      for (size_t bytes = 1; bytes < size_t(1) << 34; bytes = bytes * 3 + 1) {
        if (why_not_relayed(Collective::kAllReduce, DType::kU8, bytes, facts)) continue;
        const Bridge bridge = plan_between(schedule::Collective::kAllReduce, bytes, facts);
        EXPECT_FALSE(bridge.by_leader) << bytes << " bytes, " << ranks << " ranks on each of " << hosts;
        EXPECT_EQ(bridge.before, Collective::kReduceScatter);
        EXPECT_EQ(bridge.after, Collective::kAllGather);
      }
    }
  }
}

}  // namespace
}  // namespace nvx::test
