// Collectives over several hosts with a host proxy instead of the channel: the steps that call it, in which order,
// that it waits where it must, and that the bits are those of the channel.

#include "group/hierarchy/host_proxy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "group/plan/chunks.h"
#include "kernel/reduce/float_bits.h"
#include "kernel/reduce/level.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;

/// The ranks of one host, as threads that read each other's memory directly.
struct OneHost {
  explicit OneHost(size_t local_ranks) : barrier(std::ptrdiff_t(local_ranks)), steps(local_ranks) {}
  std::barrier<> barrier;
  std::vector<const Operation*> steps;  // by local_rank: its current step
};

/// A thread simulates the device: it takes the steps in their order and waits as they demand.
class SimulatedHostProxy final : public HostProxy {
 public:
  SimulatedHostProxy(OneHost& host, size_t local_rank, Status end = {})
      : host_(host), local_rank_(local_rank), end_(std::move(end)) {}
  ~SimulatedHostProxy() override { cancelled_ = true; }

  /// The slots of operations that the host only moves are in device memory from now on.
  void offer_device_memory(std::span<std::byte> memory) { offered_ = memory; }

  Status make(const SlotRequest& room) override {
    slices_ = room.slices, room_ = room.bytes;
    EXPECT_EQ(room.rounds, room.slices + kRounds + 1);
    on_device_ = room.moves_only && !offered_.empty();
    if (on_device_) {
      EXPECT_LE(kSlots * room_, offered_.size());
    } else {
      memory_.resize(kSlots * room_);
    }
    slots_ = on_device_ ? offered_.first(kSlots * room_) : std::span(memory_);
    return {};
  }
  std::byte* at(size_t k) override { return slots_.data() + k % kSlots * room_; }
  bool on_device() const override { return on_device_; }
  const Stamp* host_counter() override { return &said_; }
  Status begin_round(std::span<const Operation> steps) override {
    std::vector<Operation> kept;
    for (const Operation& step : steps) kept.push_back(copy_of(step));
    std::lock_guard lock(mutex_);
    begun_.push_back(std::move(kept));
    if (!device_.joinable()) device_ = std::jthread([this] { run(); });
    return {};
  }
  void signal(Stamp what) override {
    EXPECT_LT(std::atomic_ref<Stamp>(said_).exchange(what), what);
    EXPECT_LE(what, may_copy_back(ended_)) << "the slice has not arrived";
  }
  Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    EXPECT_FALSE(deadline.passed(Clock::now()));
    for (; ended_ <= round; std::this_thread::yield()) meanwhile();
    return {};
  }
  Status await_all(const Deadline& deadline) override {
    NVX_TRY(await(slices_ + kRounds, deadline, [] {}));
    seen_home_ = true;
    return end_;
  }

  size_t slices() const { return ended_ - kRounds - 1; }
  bool seen_home() const { return seen_home_; }
  bool has_begun() const { return ended_ != 0; }
  /// Bytes copied to host memory, and back.
  size_t d2h() const { return d2h_; }
  size_t h2d() const { return h2d_; }

 private:
  static Operation copy_of(const Operation& o) {
    Operation copy;
    copy.collective = o.collective, copy.dtype = o.dtype, copy.op = o.op, copy.factor = o.factor, copy.root = o.root;
    copy.in = o.in, copy.out = o.out, copy.count = o.count, copy.awaited = o.awaited, copy.awaits = o.awaits;
    for (const auto& [to, from] : {std::pair{&copy.send, &o.send}, std::pair{&copy.recv, &o.recv}}) {
      *to = Pieces(from->size());
      for (size_t p = 0; p < from->size(); ++p) (*to)[p] = (*from)[p];
    }
    return copy;
  }

  void run() {
    for (size_t round = 0; !cancelled_;) {
      {
        std::lock_guard lock(mutex_);
        if (round < begun_.size()) running_ = std::move(begun_[round]), ++round;
      }
      for (const Operation& step : std::exchange(running_, {})) {
        while (step.awaited && std::atomic_ref(said_) < step.awaits) {
          if (cancelled_) return;
          std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
        perform(step);
      }
      ended_ = round;
    }
  }
  bool is_host(const std::byte* at) const { return at >= slots_.data() && at < slots_.data() + slots_.size(); }

  void perform(const Operation& step) {
    switch (step.collective) {
      case Collective::kReduce:
      case Collective::kReduceScatter: return sum(step);
      case Collective::kBroadcast:
      case Collective::kAllGather: return gather(step);
      default: return move(step);
    }
  }
  void move(const Operation& step) {
    EXPECT_EQ(step.collective, Collective::kNone);
    EXPECT_EQ(step.send.size(), step.recv.size());
    for (size_t i = 0; i < step.send.size(); ++i) {
      const kernel::Piece from = step.send[i], to = step.recv[i];
      EXPECT_EQ(from.bytes, to.bytes);
      if (from.bytes == 0) continue;
      EXPECT_NE(is_host(from.data), is_host(to.data));
      (is_host(to.data) ? d2h_ : h2d_) += to.bytes;
      std::memcpy(to.data, from.data, to.bytes);
    }
  }
  /// The term that a rank adds to a sum: this local_rank's part of it, or all of it for the root.
  static kernel::Piece term_of(const Operation& step, size_t local_rank) {
    if (step.collective == Collective::kReduceScatter) return step.send[local_rank];
    const size_t bytes = int(local_rank) == step.root ? step.count * size_of(step.dtype) : 0;
    return {const_cast<std::byte*>(step.in), bytes};
  }
  void sum(const Operation& step) {
    std::vector<std::byte> result(term_of(step, local_rank_).bytes);
    together(step, [&] {
      std::vector<const void*> terms;
      std::vector<double> factors;
      for (const Operation* there : host_.steps) {
        const kernel::Piece term = term_of(*there, local_rank_);
        terms.push_back(term.data);
        factors.push_back(there->factor);
        EXPECT_EQ(term.bytes, result.size());
        EXPECT_EQ(nvx::describe(there->fingerprint()), nvx::describe(step.fingerprint()));
      }
      if (!result.empty())
        kernel::level().reduce(step.dtype, step.op)(result.data(), terms.data(), int(terms.size()),
                                                    result.size() / size_of(step.dtype), factors.data());
    });
    if (result.empty()) return;
    EXPECT_TRUE(is_host(step.out) && is_host(step.out + result.size() - 1));
    std::memcpy(step.out, result.data(), result.size());
    d2h_ += result.size();
  }
  void gather(const Operation& step) {
    together(step, [&] {
      for (size_t s = 0; s < host_.steps.size(); ++s) {
        const Operation& there = *host_.steps[s];
        EXPECT_EQ(there.recv[s].bytes, step.recv[s].bytes);
        EXPECT_EQ(nvx::describe(there.fingerprint()), nvx::describe(step.fingerprint()));
        const bool sends = step.collective == Collective::kAllGather || int(s) == step.root;
        const bool in_place = step.recv[s].data == there.in;  // the other ranks read it now
        if (sends && step.recv[s].bytes != 0 && !in_place) std::memcpy(step.recv[s].data, there.in, step.recv[s].bytes);
      }
    });
  }
  void together(const Operation& step, const std::function<void()>& act) {
    host_.steps[local_rank_] = &step;
    host_.barrier.arrive_and_wait();
    act();
    host_.barrier.arrive_and_wait();
  }

  OneHost& host_;
  const size_t local_rank_;
  const Status end_;
  size_t slices_ = 0, room_ = 0;
  std::vector<std::byte> memory_;
  std::span<std::byte> offered_, slots_;
  bool on_device_ = false;
  Stamp said_ = 0;
  std::mutex mutex_;
  std::vector<std::vector<Operation>> begun_;  // by round
  std::vector<Operation> running_;
  std::atomic<size_t> ended_{0};
  std::atomic<bool> cancelled_{false};
  size_t d2h_ = 0, h2d_ = 0;
  bool seen_home_ = false;
  std::jthread device_;
};

/// Runs an operation from its call to its end.
Status proxy_of(Group& group, Operation& operation, HostProxy& proxy) {
  operation.proxy = &proxy;
  NVX_TRY(group.reserve_slots(operation));
  operation.number = group.next_number();
  NVX_TRY(group.launch(operation));
  return group.execute(operation);
}

/// One `OneHost` for each host.
std::vector<std::unique_ptr<OneHost>> simulated_hosts(const std::vector<int>& host_of) {
  std::vector<std::unique_ptr<OneHost>> simulated;
  for (int host = 0; host <= std::ranges::max(host_of); ++host)
    simulated.push_back(std::make_unique<OneHost>(size_t(std::ranges::count(host_of, host))));
  return simulated;
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

/// The same as f16, two in the place of each f32.
std::vector<float> halves(size_t count, int rank) {
  std::vector<float> all = floats(count, rank);
  for (float& x : all) {
    const uint32_t bits = kernel::F16::round(x).bits;
    x = std::bit_cast<float>(bits << 16 | bits);
  }
  return all;
}

/// ThreadSanitizer would take half a minute for several slices in every shape.
void expect_sums_of_the_channel(size_t most) {
  for (const std::vector<int>& host_of :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 1}, {0, 1, 2}, {0, 1, 1}}) {
    const size_t count = host_of.size() == 4 ? most : as_fast(most, std::min<size_t>(most, 70'000));
    Hosts hosts(host_of);
    const auto simulated = simulated_hosts(host_of);
    hosts.in_group("proxy", [&](Group& group, int rank) {
      const std::array all{Sum{DType::kF32, ReduceOp::kAvg}, Sum{DType::kF32, ReduceOp::kSum},
                           Sum{DType::kF32, ReduceOp::kPremulSum}, Sum{DType::kI32, ReduceOp::kBxor}};
      for (const Sum sum : std::span(all).first(as_fast(all.size(), 1))) {
        std::vector<float> mine = floats(count, rank), want = mine;
        Operation plain = all_reduce(want, count, sum, rank), proxied = all_reduce(mine, count, sum, rank);
        ASSERT_TRUE(group.execute(plain).ok());
        SimulatedHostProxy proxy(*simulated[size_t(host_of[size_t(rank)])], size_t(group.core().members.local_rank()));
        ASSERT_TRUE(proxy_of(group, proxied, proxy).ok());
        EXPECT_EQ(std::memcmp(mine.data(), want.data(), count * sizeof(float)), 0);
        const InterHostPlan inter_host = plan_between(schedule::Collective::kAllReduce, count * 4, group.plan_facts());
        EXPECT_EQ(proxy.slices(), inter_host.by_leader ? 1 : (count * 4 + inter_host.slice - 1) / inter_host.slice);
        EXPECT_TRUE(proxy.seen_home());
      }
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

TEST(HostProxy, GivesTheBitsOfTheChannel) { expect_sums_of_the_channel(as_fast(1'700'001, 520'001)); }

TEST(HostProxy, GivesTheBitsOfTheChannelToSmallSums) {
  for (const size_t count : {1, 100, 4000, 20'000, 70'000}) expect_sums_of_the_channel(count);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// One rank's side of a reduce_scatter or an all_gather with blocks of these counts.
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
  const auto simulated = simulated_hosts(host_of);
  hosts.in_group("proxy", [&](Group& group, int rank) {
    for (const Collective collective : {Collective::kReduceScatter, Collective::kAllGather}) {
      for (const Sum sum : sums.first(collective == Collective::kAllGather ? 1 : sums.size())) {
        InBlocks plain(collective, counts, sum, rank), proxied(collective, counts, sum, rank);
        ASSERT_TRUE(group.execute(plain.o).ok());
        SimulatedHostProxy proxy(*simulated[size_t(host_of[size_t(rank)])], size_t(group.core().members.local_rank()));
        ASSERT_TRUE(proxy_of(group, proxied.o, proxy).ok());
        EXPECT_TRUE(same_bits(proxied.whole, plain.whole) && same_bits(proxied.own, plain.own))
            << nvx::name(collective) << " of " << nvx::name(sum.dtype);
        EXPECT_TRUE(proxy.seen_home());
        size_t of_local_rank = 0;
        for (const std::vector<int>& host : group.topology().hosts)
          of_local_rank += counts[size_t(host[size_t(group.core().members.local_rank())])] * size_of(sum.dtype);
        const size_t mine = counts[size_t(rank)] * size_of(sum.dtype);
        const bool scatters = collective == Collective::kReduceScatter;
        EXPECT_EQ(proxy.d2h(), scatters ? of_local_rank : mine);
        EXPECT_EQ(proxy.h2d(), scatters ? mine : of_local_rank - mine);
      }
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(HostProxy, GivesTheBitsOfTheChannelToBlocks) {
  const size_t n = as_fast(600'001, 150'001);
  const std::array sums{Sum{DType::kF32, ReduceOp::kAvg}, Sum{DType::kF16, ReduceOp::kAvg},
                        Sum{DType::kF32, ReduceOp::kPremulSum}, Sum{DType::kI32, ReduceOp::kBxor},
                        Sum{DType::kC64, ReduceOp::kAvg}};
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 1, 1, 2, 2}}) {
    const size_t some = host_of.size() == 4 ? as_fast(sums.size(), 1) : 1;
    expect_bits_of_the_channel(host_of, std::vector<size_t>(host_of.size(), n), std::span(sums).first(some));
  }
}

TEST(HostProxy, GivesTheBitsOfTheChannelToBlocksOfAnySize) {
  const size_t n = as_fast(600'001, 150'001);
  const std::array sums{Sum{DType::kF32, ReduceOp::kSum}};
  expect_bits_of_the_channel({0, 0, 1, 1}, {n, 1, 0, n / 2}, sums);
  expect_bits_of_the_channel({1, 0, 0, 1}, {0, n, n, 7}, sums);
  expect_bits_of_the_channel({1, 0, 0, 1}, {3, 1, 0, 2}, sums);
  expect_bits_of_the_channel({0, 1, 2}, {1000, n, 1}, sums);
}

/// With GPUDirect, an all_gather leaves out host memory, and no network card forwards a block that another one has
/// written. A sum needs the host.
TEST(HostProxy, GathersFromDeviceToDeviceWhereTheLinkCan) {
  constexpr size_t kRoom = size_t(40) << 20;
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 2, 3, 4, 5}}) {
    const size_t ranks = host_of.size(), n = ranks == 4 ? as_fast(600'001, 150'001) : 1001;
    net::LoopbackNet::Options options;
    options.no_device_memory = "";
    Hosts hosts(host_of, options);
    const auto simulated = simulated_hosts(host_of);
    std::vector<std::byte> room(ranks * kRoom);
    std::atomic<uint64_t> between{0};
    hosts.in_group("rdma", [&](Group& group, int rank) {
      const std::span<std::byte> own = std::span(room).subspan(size_t(rank) * kRoom, kRoom);
      hosts.options("rdma", rank).messenger()->use_device_memory(own);
      const auto proxied = [&](Collective collective) {
        InBlocks plain(collective, std::vector<size_t>(ranks, n), {DType::kF32, ReduceOp::kSum}, rank);
        InBlocks direct(collective, std::vector<size_t>(ranks, n), {DType::kF32, ReduceOp::kSum}, rank);
        ASSERT_TRUE(group.execute(plain.o).ok());
        SimulatedHostProxy proxy(*simulated[size_t(host_of[size_t(rank)])], size_t(group.core().members.local_rank()));
        proxy.offer_device_memory(own);
        ASSERT_TRUE(proxy_of(group, direct.o, proxy).ok());
        EXPECT_TRUE(same_bits(direct.whole, plain.whole) && same_bits(direct.own, plain.own)) << nvx::name(collective);
        EXPECT_EQ(proxy.on_device(), collective == Collective::kAllGather);
      };
      proxied(Collective::kAllGather);
      proxied(Collective::kReduceScatter);
      between += n * sizeof(float) * (group.topology().hosts.size() - 1);
      ASSERT_TRUE(barrier(group).ok());
    });
    EXPECT_EQ(hosts.net().counts().device_bytes, between);
    EXPECT_EQ(hosts.net().counts().host_copies, 0u);
  }
}

/// Beyond eight hosts, slices are shorter than those of the channel.
TEST(HostProxy, GivesTheBitsOfTheChannelToManyHosts) {
  if (why_no_processes()) GTEST_SKIP() << "megabytes take minutes here";
  std::vector<int> host_of;
  for (int rank = 0; rank < 20; ++rank) host_of.push_back(rank / 2);
  const std::array sums{Sum{DType::kF32, ReduceOp::kAvg}};
  expect_bits_of_the_channel(host_of, std::vector<size_t>(20, as_fast(150'000, 30'000)), sums);
}

/// Collectives without steps for kernels: the host carries them out, in chunks if they are large.
struct ByTheHost {
  ByTheHost(Collective collective, size_t count, int rank, int ranks) : out(floats(count * size_t(ranks), 50 + rank)) {
    in = floats(count * size_t(ranks), rank);
    o.collective = collective, o.dtype = DType::kF32, o.op = ReduceOp::kAvg;
    const bool rooted = collective != Collective::kAllToAll;
    if (rooted) o.root = 1;
    const auto pieces = [&](std::vector<float>& all) {
      Pieces pieces{size_t(ranks)};
      for (size_t p = 0; p < pieces.size(); ++p)
        pieces[p] = {reinterpret_cast<std::byte*>(all.data() + p * count), count * sizeof(float)};
      return pieces;
    };
    const bool is_root = rank == o.root;
    if (collective == Collective::kAllToAll || (collective == Collective::kScatter && is_root)) o.send = pieces(in);
    if (collective == Collective::kAllToAll || (collective == Collective::kGather && is_root)) o.recv = pieces(out);
    if (collective == Collective::kGather) o.send = only(in, count, ranks);
    if (collective == Collective::kScatter) o.recv = only(out, count, ranks);
    if (collective == Collective::kReduce || collective == Collective::kBroadcast) {
      o.count = in.size();
      o.in = o.out = reinterpret_cast<std::byte*>(in.data());
    }
    if (collective == Collective::kBroadcast) {
      o.recv = Pieces(size_t(ranks));
      for (int p = 0; p < ranks; ++p) o.recv[size_t(p)] = {o.out, in.size() * sizeof(float)};
    }
    for (Pieces* empty : {&o.send, &o.recv}) {
      if (rooted && collective != Collective::kReduce && empty->size() == 0) *empty = Pieces(size_t(ranks));
    }
  }
  Pieces only(std::vector<float>& all, size_t count, int ranks) const {
    Pieces pieces{size_t(ranks)};
    pieces[size_t(o.root)] = {reinterpret_cast<std::byte*>(all.data()), count * sizeof(float)};
    return pieces;
  }
  std::vector<float> in, out;
  Operation o;
};

/// One shape is enough for several chunks.
TEST(HostProxy, GivesTheBitsOfTheChannelWhereTheHostDoesIt) {
  for (const std::vector<int>& host_of : {std::vector<int>{0, 0, 1, 1}, {0, 1, 1}, {0, 1, 2}}) {
    const size_t large = host_of.size() == 4 ? as_fast(1'000'001, 300'001) : 4001;
    Hosts hosts(host_of);
    const auto simulated = simulated_hosts(host_of);
    hosts.in_group("proxy", [&](Group& group, int rank) {
      for (const Collective collective : {Collective::kReduce, Collective::kBroadcast, Collective::kAllToAll,
                                          Collective::kGather, Collective::kScatter}) {
        for (const size_t count : {size_t(0), size_t(3), size_t(1000), large}) {
          ByTheHost plain(collective, count, rank, hosts.ranks()), proxied(collective, count, rank, hosts.ranks());
          ASSERT_TRUE(group.execute(plain.o).ok());
          SimulatedHostProxy proxy(*simulated[size_t(host_of[size_t(rank)])],
                                   size_t(group.core().members.local_rank()));
          const Status status = proxy_of(group, proxied.o, proxy);
          ASSERT_TRUE(status.ok()) << status.what();
          EXPECT_TRUE(proxy.seen_home());
          const bool has_result = collective != Collective::kReduce || rank == 1;
          EXPECT_TRUE(!has_result || same_bits(proxied.in, plain.in)) << nvx::name(collective) << " of " << count;
          EXPECT_TRUE(same_bits(proxied.out, plain.out)) << nvx::name(collective) << " of " << count;
        }
      }
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

/// The proxy has begun all of its steps but cannot report their end: no result may be used.
TEST(HostProxy, ReportsAFailureOfItsEnd) {
  const std::vector<int> host_of{0, 0, 1, 1};
  Hosts hosts(host_of);
  const auto simulated = simulated_hosts(host_of);
  hosts.in_group("proxy", [&](Group& group, int rank) {
    const Sum sum{DType::kF32, ReduceOp::kSum};
    std::vector<float> data = floats(100'000, rank);
    InBlocks scattered(Collective::kReduceScatter, std::vector<size_t>(4, 1000), sum, rank);
    InBlocks gathered(Collective::kAllGather, std::vector<size_t>(4, 1000), sum, rank);
    Operation reduced = all_reduce(data, data.size(), sum, rank);
    for (Operation* const o : {&scattered.o, &gathered.o, &reduced}) {
      SimulatedHostProxy proxy(*simulated[size_t(host_of[size_t(rank)])], size_t(group.core().members.local_rank()),
                               {Code::kSystem, "nvx: no end"});
      EXPECT_EQ(proxy_of(group, *o, proxy).what(), "nvx: no end") << nvx::name(o->collective);
      EXPECT_TRUE(proxy.seen_home());
    }
    ASSERT_TRUE(barrier(group).ok());
  });
}

/// The peers would wait for the steps that this rank has not begun.
TEST(HostProxy, FailsTheGroupWhereItCannotBegin) {
  struct Broken final : HostProxy {
    Status make(const SlotRequest&) override { return {}; }
    std::byte* at(size_t) override { return nullptr; }
    const Stamp* host_counter() override { return nullptr; }
    Status begin_round(std::span<const Operation>) override { return {Code::kInvalid, "nvx: no memory for it"}; }
    void signal(Stamp) override { ADD_FAILURE() << "it has not begun"; }
    Status await(size_t, const Deadline&, const std::function<void()>&) override { return {}; }
    Status await_all(const Deadline&) override { return {}; }
  };
  Hosts hosts({0, 0, 1, 1});
  const auto simulated = simulated_hosts({0, 0, 1, 1});
  hosts.in_group("proxy", [&](Group& group, int rank) {
    std::vector<float> data(100'000);
    Operation o = all_reduce(data, data.size(), {DType::kF32, ReduceOp::kSum}, rank);
    Broken broken;
    SimulatedHostProxy whole(*simulated[size_t(rank / 2)], size_t(group.core().members.local_rank()));
    const Status status = proxy_of(group, o, rank == 1 ? static_cast<HostProxy&>(broken) : whole);
    EXPECT_TRUE(group.failed());
    EXPECT_NE(status.what().find("no memory for it"), std::string::npos) << status.what();
  });
}

/// Ranks that call different operations get an error before any step begins.
TEST(HostProxy, DoesNothingWhereRanksCallDifferentThings) {
  Hosts hosts({0, 0, 1, 1});
  hosts.in_group("proxy", [&](Group& group, int rank) {
    OneHost host(1);
    SimulatedHostProxy proxy(host, 0);
    std::vector<float> data(100'000);
    Operation o = all_reduce(data, rank == 2 ? 99'999 : 100'000, {DType::kF32, ReduceOp::kSum}, rank);
    const Status status = proxy_of(group, o, proxy);
    EXPECT_EQ(status.code() == Code::kMismatch || status.code() == Code::kPeerFailed, true) << status.what();
    EXPECT_FALSE(proxy.has_begun());
  });
}

TEST(HostProxy, ServesWhatIsSummedOrGatheredOnSeveralHosts) {
  const size_t large = kChunk / 4 + 1;  // in elements of f32
  const auto of = [](size_t ranks, size_t hosts, size_t rails, size_t world) {
    PlanFacts facts;
    facts.ranks = ranks, facts.hosts = hosts, facts.rails = rails, facts.world = world;
    return facts;
  };
  const PlanFacts even = of(4, 2, 4, 8), uneven = of(4, 2, 3, 7), single = of(1, 3, 1, 3), one_host = of(4, 1, 4, 4);
  const std::string_view yes = "", nothing = "there is nothing to move", unknown = "the type is unknown to nvx",
                         uneven_why = "hosts have different numbers", others = "only all_reduce, reduce_scatter and";
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
      {Collective::kAllReduce, DType::kF16, 1, &even, yes},
      {Collective::kAllReduce, DType::kF32, 0, &even, nothing},
      {Collective::kAllReduce, DType::kF32, large, &single, yes},
      {Collective::kAllReduce, DType::kF32, large, &one_host, "the ranks are on one host"},
      {Collective::kReduceScatter, DType::kF32, large, &even, yes},
      {Collective::kReduceScatter, DType::kF32, 8, &even, yes},
      {Collective::kReduceScatter, DType::kF32, large, &uneven, uneven_why},
      {Collective::kReduceScatter, DType::kF32, large, &single, yes},
      {Collective::kAllGather, DType::kF32, large, &even, yes},
      {Collective::kAllGather, DType::kBytes, 4 * large, &even, unknown},
      {Collective::kAllGather, DType::kF32, large, &uneven, uneven_why},
      {Collective::kAllGather, DType::kF32, large, &one_host, "the ranks are on one host"},
      {Collective::kReduce, DType::kF32, large, &even, others},
      {Collective::kBroadcast, DType::kF32, large, &even, others},
      {Collective::kAllToAll, DType::kF32, large, &even, others},
  };
  for (const Case& c : cases) {
    const char* const why = why_not_by_kernels(c.collective, c.dtype, c.count, *c.facts);
    const std::string_view text = why ? why : "";
    EXPECT_TRUE(c.why == yes ? text == yes : text.starts_with(c.why))
        << nvx::name(c.collective) << " of " << c.count << ' ' << nvx::name(c.dtype) << ", " << c.facts->world
        << " ranks on " << c.facts->hosts << " hosts: " << text;
  }
}

/// A slot holds a slice of every host's block. With many hosts, these together are at most a chunk.
TEST(HostProxy, CutsBlocksAsThePlanDoesAndShorterForManyHosts) {
  for (const size_t hosts : {2, 8, 9, 100, 5000}) {
    PlanFacts facts;
    facts.ranks = facts.rails = 4, facts.hosts = hosts, facts.world = 4 * hosts;
    for (const auto across : {schedule::Collective::kReduceScatter, schedule::Collective::kAllGather}) {
      const InterHostPlan inter_host = plan_between(across, size_t(1) << 30, facts);
      const size_t slice = proxy_slice(inter_host, facts);
      EXPECT_EQ(slice % 64, 0u);
      EXPECT_LE(slice * hosts, kChunk);
      EXPECT_EQ(slice == inter_host.slice, hosts <= 8);
    }
  }
}

}  // namespace
}  // namespace nvx::test
