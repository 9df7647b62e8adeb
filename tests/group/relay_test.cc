// Collectives over several hosts whose steps inside a host are not the channel's: what a relay is asked for, in which
// order, and that the bits are those of the channel.

#include "group/relay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cstring>
#include <random>
#include <span>
#include <utility>

#include "group/chunks.h"
#include "kernel/float_bits.h"
#include "kernel/level.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;

/// The ranks of one host, as threads that read each other's memory where it is.
struct OneHost {
  explicit OneHost(size_t seats) : meet(std::ptrdiff_t(seats)), steps(seats) {}
  std::barrier<> meet;
  std::vector<const Operation*> steps;  // by seat: what each is at
};

/// Does each step at once, and keeps what is on its way there for a few looks.
class PlayedRelay final : public Relay {
 public:
  PlayedRelay(OneHost& host, size_t seat, Status end = {}) : host_(host), seat_(seat), end_(std::move(end)) {}

  Status begin(const Room& room) override {
    room_ = room;
    return {};
  }
  std::byte* at(size_t k) override { return slot(k).host.data(); }
  std::byte* scratch(size_t k) override { return slot(k).device.data(); }
  Status set_out(size_t k, std::span<const Operation> steps, const Haul& down) override {
    EXPECT_EQ(k, set_out_++);
    EXPECT_LT(k, home_ + kSlots) << "its memory is still in use";
    for (const Operation& step : steps) perform(step);
    EXPECT_LE(down.at + down.there.bytes, slot(k).host.size());
    if (down.there.bytes != 0) std::memcpy(at(k) + down.at, down.there.data, down.there.bytes);
    down_ += down.there.bytes;
    return {};
  }
  Status arrive(size_t k, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    EXPECT_LT(k, set_out_);
    EXPECT_FALSE(deadline.passed(Clock::now()));
    for (size_t looks = 0; looks < k % 3; ++looks) meanwhile();
    return {};
  }
  Status come_home(size_t k, std::span<const Haul> up, std::span<const Operation> steps) override {
    EXPECT_EQ(k, home_++);
    for (const Haul& haul : up) {
      EXPECT_LE(haul.at + haul.there.bytes, slot(k).host.size());
      if (haul.there.bytes != 0) std::memcpy(haul.there.data, at(k) + haul.at, haul.there.bytes);
      up_ += haul.there.bytes;
    }
    for (const Operation& step : steps) perform(step);
    return {};
  }
  Status end() override {
    EXPECT_EQ(set_out_, home_);
    ended_ = true;
    return end_;
  }
  size_t slices() const { return home_; }
  bool ended() const { return ended_; }
  /// Bytes that have come to host memory, and gone back.
  size_t down() const { return down_; }
  size_t up() const { return up_; }

 private:
  struct Slot {
    std::vector<std::byte> host, device;
  };
  Slot& slot(size_t k) {
    Slot& slot = slots_[k % kSlots];
    slot.host.resize(room_.host), slot.device.resize(room_.device);
    return slot;
  }

  void perform(const Operation& step) { step.collective == Collective::kReduceScatter ? sum(step) : tell(step); }
  void sum(const Operation& step) {
    std::vector<std::byte> result(step.send[seat_].bytes);
    together(step, [&] {
      std::vector<const void*> terms;
      std::vector<double> factors;
      for (const Operation* there : host_.steps) {
        terms.push_back(there->send[seat_].data);
        factors.push_back(there->factor);
        EXPECT_EQ(there->send[seat_].bytes, result.size());
        EXPECT_EQ(nvx::describe(there->fingerprint()), nvx::describe(step.fingerprint()));
      }
      if (!result.empty())
        kernel::level().reduce(step.dtype, step.op)(result.data(), terms.data(), int(terms.size()),
                                                    result.size() / size_of(step.dtype), factors.data());
    });
    if (!result.empty()) std::memcpy(step.out, result.data(), result.size());
  }
  void tell(const Operation& step) {
    EXPECT_EQ(step.collective, Collective::kAllGather);
    together(step, [&] {
      for (size_t s = 0; s < host_.steps.size(); ++s) {
        EXPECT_EQ(host_.steps[s]->recv[s].bytes, step.recv[s].bytes);
        EXPECT_EQ(nvx::describe(host_.steps[s]->fingerprint()), nvx::describe(step.fingerprint()));
        const bool in_place = step.recv[s].data == host_.steps[s]->in;  // which the others read now
        if (step.recv[s].bytes != 0 && !in_place)
          std::memcpy(step.recv[s].data, host_.steps[s]->in, step.recv[s].bytes);
      }
    });
  }
  void together(const Operation& step, const std::function<void()>& act) {
    host_.steps[seat_] = &step;
    host_.meet.arrive_and_wait();
    act();
    host_.meet.arrive_and_wait();
  }

  OneHost& host_;
  const size_t seat_;
  const Status end_;
  Room room_;
  std::array<Slot, kSlots> slots_;
  size_t set_out_ = 0, home_ = 0, down_ = 0, up_ = 0;
  bool ended_ = false;
};

/// One for each host.
std::vector<std::unique_ptr<OneHost>> played_hosts(const std::vector<int>& host_of) {
  std::vector<std::unique_ptr<OneHost>> played;
  for (int host = 0; host <= std::ranges::max(host_of); ++host)
    played.push_back(std::make_unique<OneHost>(size_t(std::ranges::count(host_of, host))));
  return played;
}

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

std::vector<float> floats(size_t count, int rank) {
  std::vector<float> all(count);
  std::minstd_rand random(unsigned(rank) + 1);
  for (float& x : all) x = float(random()) / float(1 << 20);
  return all;
}

/// The same of f16, two in the place of each.
std::vector<float> halves(size_t count, int rank) {
  std::vector<float> all = floats(count, rank);
  for (float& x : all) {
    const uint32_t bits = kernel::F16::round(x).bits;
    x = std::bit_cast<float>(bits << 16 | bits);
  }
  return all;
}

TEST(Relay, GivesTheBitsOfTheChannel) {
  const size_t count = as_fast(1'700'001, 500'001);
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1}}) {
    Hosts hosts(host_of);
    MemoryStore store;
    const auto played = played_hosts(host_of);
    as_threads(hosts.ranks(), [&](int rank) {
      Group group(store, hosts.options("relay", rank));
      const std::array all{Sum{DType::kF32, ReduceOp::kAvg}, Sum{DType::kF32, ReduceOp::kSum},
                           Sum{DType::kF32, ReduceOp::kPremulSum}, Sum{DType::kI32, ReduceOp::kBxor}};
      for (const Sum sum : std::span(all).first(hosts.ranks() == 4 ? all.size() : as_fast(all.size(), 1))) {
        std::vector<float> mine = floats(count, rank), want = mine;
        Operation plain = all_reduce(want, count, sum, rank), relayed = all_reduce(mine, count, sum, rank);
        ASSERT_TRUE(group.execute(plain).ok());
        PlayedRelay relay(*played[size_t(host_of[size_t(rank)])], size_t(group.seat()));
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

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One rank's side of a reduce_scatter or an all_gather of blocks of these counts.
struct InBlocks {
  InBlocks(Collective collective, const std::vector<size_t>& counts, const Sum& sum, int rank) {
    const size_t width = size_of(sum.dtype);
    std::vector<size_t> starts;
    size_t total = 0;
    for (const size_t count : counts) starts.push_back(std::exchange(total, total + count));
    const auto made = sum.dtype == DType::kF16 ? halves : floats;
    whole = made(total * width / 4 + 1, rank);
    own = made(counts[size_t(rank)] * width / 4 + 1, 100 + rank);
    o.collective = collective, o.dtype = sum.dtype, o.op = sum.op, o.factor = 0.5 + rank, o.count = total;
    Pieces& pieces = collective == Collective::kReduceScatter ? o.send : o.recv;
    pieces = Pieces(counts.size());
    for (size_t r = 0; r < counts.size(); ++r)
      pieces[r] = {reinterpret_cast<std::byte*>(whole.data()) + starts[r] * width, counts[r] * width};
    o.in = o.out = reinterpret_cast<std::byte*>(own.data());
  }
  std::vector<float> whole;  ///< all blocks
  std::vector<float> own;    ///< where a reduce_scatter's result goes, or an all_gather's input is
  Operation o;
};

void expect_bits_of_the_channel(const std::vector<int>& host_of, const std::vector<size_t>& counts,
                                std::span<const Sum> sums) {
  Hosts hosts(host_of);
  MemoryStore store;
  const auto played = played_hosts(host_of);
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("relay", rank));
    for (const Collective collective : {Collective::kReduceScatter, Collective::kAllGather}) {
      for (const Sum sum : sums.first(collective == Collective::kAllGather ? 1 : sums.size())) {
        InBlocks plain(collective, counts, sum, rank), relayed(collective, counts, sum, rank);
        ASSERT_TRUE(group.execute(plain.o).ok());
        PlayedRelay relay(*played[size_t(host_of[size_t(rank)])], size_t(group.seat()));
        relayed.o.relay = &relay;
        ASSERT_TRUE(group.execute(relayed.o).ok());
        EXPECT_TRUE(same_bits(relayed.whole, plain.whole) && same_bits(relayed.own, plain.own))
            << nvx::name(collective) << " of " << nvx::name(sum.dtype);
        EXPECT_TRUE(relay.ended());
        size_t of_seat = 0;
        for (const std::vector<int>& host : group.topology().hosts)
          of_seat += counts[size_t(host[size_t(group.seat())])] * size_of(sum.dtype);
        const size_t mine = counts[size_t(rank)] * size_of(sum.dtype);
        const bool scatters = collective == Collective::kReduceScatter;
        EXPECT_EQ(relay.down(), scatters ? of_seat : mine);
        EXPECT_EQ(relay.up(), scatters ? mine : of_seat - mine);
        EXPECT_GE(relay.slices(), 2u);
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(Relay, GivesTheBitsOfTheChannelToBlocks) {
  const size_t n = as_fast(600'001, 300'001);
  const std::array sums{Sum{DType::kF32, ReduceOp::kAvg}, Sum{DType::kF16, ReduceOp::kAvg},
                        Sum{DType::kF32, ReduceOp::kPremulSum}, Sum{DType::kI32, ReduceOp::kBxor},
                        Sum{DType::kC64, ReduceOp::kAvg}};
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}}) {
    const size_t some = host_of.size() == 4 ? as_fast(sums.size(), 2) : 1;
    expect_bits_of_the_channel(host_of, std::vector<size_t>(host_of.size(), n), std::span(sums).first(some));
  }
}

TEST(Relay, GivesTheBitsOfTheChannelToBlocksOfAnySize) {
  const size_t n = as_fast(600'001, 300'001);
  const std::array sums{Sum{DType::kF32, ReduceOp::kSum}};
  expect_bits_of_the_channel({0, 0, 1, 1}, {n, 1, 0, n / 2}, sums);
  expect_bits_of_the_channel({1, 0, 0, 1}, {0, n, n, 7}, sums);
}

/// Beyond eight hosts slices are shorter than the channel's.
TEST(Relay, GivesTheBitsOfTheChannelToManyHosts) {
  if (why_no_processes()) GTEST_SKIP() << "megabytes take minutes here";
  std::vector<int> host_of;
  for (int rank = 0; rank < 20; ++rank) host_of.push_back(rank / 2);
  const std::array sums{Sum{DType::kF32, ReduceOp::kAvg}};
  expect_bits_of_the_channel(host_of, std::vector<size_t>(20, 150'000), sums);
}

/// It has begun all that it was to begin, and cannot say when that is over: nothing that is there may be used.
TEST(Relay, IsHeardWhereItsEndFails) {
  const std::vector<int> host_of{0, 0, 1, 1};
  Hosts hosts(host_of);
  MemoryStore store;
  const auto played = played_hosts(host_of);
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("relay", rank));
    const Sum sum{DType::kF32, ReduceOp::kSum};
    std::vector<float> data = floats(100'000, rank);
    InBlocks scattered(Collective::kReduceScatter, std::vector<size_t>(4, 1000), sum, rank);
    InBlocks gathered(Collective::kAllGather, std::vector<size_t>(4, 1000), sum, rank);
    Operation reduced = all_reduce(data, data.size(), sum, rank);
    for (Operation* const o : {&scattered.o, &gathered.o, &reduced}) {
      PlayedRelay relay(*played[size_t(host_of[size_t(rank)])], size_t(group.seat()), {Code::kSystem, "nvx: no end"});
      o->relay = &relay;
      EXPECT_EQ(group.execute(*o).what(), "nvx: no end") << nvx::name(o->collective);
      EXPECT_TRUE(relay.ended());
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// Ranks that call different things are told before anything is begun.
TEST(Relay, IsNotAskedWhereRanksCallDifferentThings) {
  Hosts hosts({0, 0, 1, 1});
  MemoryStore store;
  as_threads(hosts.ranks(), [&](int rank) {
    Group group(store, hosts.options("relay", rank));
    OneHost host(1);
    PlayedRelay relay(host, 0);
    std::vector<float> data(100'000);
    Operation o = all_reduce(data, rank == 2 ? 99'999 : 100'000, {DType::kF32, ReduceOp::kSum}, rank);
    o.relay = &relay;
    const Status status = group.execute(o);
    EXPECT_EQ(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed, true) << status.what();
    EXPECT_EQ(relay.slices(), 0u);
  });
}

TEST(Relay, ServesLargeOperationsOfSeveralRanksOnEachOfSeveralHosts) {
  const size_t large = kChunk / 4 + 1;  // elements of f32
  const auto of = [](size_t ranks, size_t hosts, size_t rails, size_t world) {
    PlanFacts facts;
    facts.ranks = ranks, facts.hosts = hosts, facts.rails = rails, facts.world = world;
    return facts;
  };
  const PlanFacts even = of(4, 2, 4, 8), uneven = of(4, 2, 3, 7), alone = of(4, 2, 1, 5), one_host = of(4, 1, 4, 4);
  const std::string_view yes = "", small = "small", uneven_why = "hosts have different numbers",
                         alone_why = "a host has only one rank", others = "only all_reduce, reduce_scatter and";
  struct Case {
    Collective collective;
    DType dtype;
    size_t count;
    const PlanFacts* facts;
    std::string_view why;
  };
  const Case cases[] = {
      {Collective::kAllReduce, DType::kF32, large, &even, yes},
      {Collective::kAllReduce, DType::kF32, large, &uneven, yes},
      {Collective::kAllReduce, DType::kF32, large - 1, &even, small},
      {Collective::kAllReduce, DType::kF16, large, &even, small},
      {Collective::kAllReduce, DType::kF32, large, &alone, alone_why},
      {Collective::kAllReduce, DType::kF32, large, &one_host, "the ranks are on one host"},
      {Collective::kReduceScatter, DType::kF32, large, &even, yes},
      {Collective::kReduceScatter, DType::kF32, large - 1, &even, small},
      {Collective::kReduceScatter, DType::kF32, large, &uneven, uneven_why},
      {Collective::kReduceScatter, DType::kF32, large, &alone, alone_why},
      {Collective::kAllGather, DType::kF32, large, &even, yes},
      {Collective::kAllGather, DType::kBytes, 4 * large, &even, small},
      {Collective::kAllGather, DType::kF32, large, &uneven, uneven_why},
      {Collective::kAllGather, DType::kF32, large, &one_host, "the ranks are on one host"},
      {Collective::kReduce, DType::kF32, large, &even, others},
      {Collective::kBroadcast, DType::kF32, large, &even, others},
      {Collective::kAllToAll, DType::kF32, large, &even, others},
  };
  for (const Case& c : cases) {
    const char* const why = why_not_relayed(c.collective, c.dtype, c.count, *c.facts);
    const std::string_view said = why ? why : "";
    EXPECT_TRUE(c.why == yes ? said == yes : said.starts_with(c.why))
        << nvx::name(c.collective) << " of " << c.count << ' ' << nvx::name(c.dtype) << ", " << c.facts->world
        << " ranks on " << c.facts->hosts << " hosts: " << said;
  }
}

/// A slot holds a block's slice of every host, and no more than a chunk of those together where there are many.
TEST(Relay, CutsBlocksAsThePlanDoesAndShorterForManyHosts) {
  for (const size_t hosts : {2, 8, 9, 100, 5000}) {
    PlanFacts facts;
    facts.ranks = facts.rails = 4, facts.hosts = hosts, facts.world = 4 * hosts;
    for (const auto across : {schedule::Collective::kReduceScatter, schedule::Collective::kAllGather}) {
      const Bridge bridge = plan_between(across, size_t(1) << 30, facts);
      const size_t slice = relay_slice(bridge, facts);
      EXPECT_EQ(slice % 64, 0u);
      EXPECT_LE(slice * hosts, kChunk);
      EXPECT_EQ(slice == bridge.slice, hosts <= 8);
    }
  }
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
