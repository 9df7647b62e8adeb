// Messages between ranks of several hosts, concurrent operations, and the sums over several hosts.

#include <gtest/gtest.h>

#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using std::chrono::milliseconds;

std::shared_ptr<Message> request(int peer, int64_t tag, Bytes& memory) {
  return message(peer, tag, memory.data(), memory.size());
}

net::LoopbackNet::Options disorderly(size_t segment = 4 << 10, size_t place_above = 2 << 10) {
  net::LoopbackNet::Options options;
  options.seed = 3;
  options.segment_bytes = segment;
  options.place_above = place_above;
  options.faults.most_delay = 4;
  options.faults.reorder = 0.3;
  return options;
}

class Messages : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Bytes, Messages,
                         testing::Values(0, 8, 976, 977, 1 << 10, 1 << 20, as_fast(20'000'000, 4'000'000)));

TEST_P(Messages, ComeToAnotherHostWhole) {
  for (const bool calm : {true, false}) {
    Hosts hosts({0, 1}, calm ? net::LoopbackNet::Options() : disorderly());
    hosts.in_group("messages", [&](Group& group, int rank) {
      Bytes out = input(DType::kU8, GetParam(), rank, 1), in(GetParam());
      const auto sending = request(1 - rank, 5, out), receiving = request(1 - rank, 5, in);
      group.mailbox().send(sending, Runner::kCaller);
      ASSERT_TRUE(receive_now(group, receiving).ok()) << receiving->status().what();
      ASSERT_TRUE(group.mailbox().wait(*sending).ok()) << sending->status().what();
      EXPECT_EQ(in, input(DType::kU8, GetParam(), 1 - rank, 1));
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

/// Messages of one pair and tag keep their order for any length and any reordering by the network.
TEST(HierarchicalMessages, OfOneTagKeepsItsOrder) {
  constexpr int kCount = 300;
  Hosts hosts({0, 1}, disorderly());
  hosts.in_group("order", [&](Group& group, int rank) {
    const auto bytes = [](int i) { return size_t(i % 7 == 3 ? 5000 : 8); };
    std::vector<Bytes> memory;
    std::vector<std::shared_ptr<Message>> all;
    for (int i = 0; i < kCount; ++i) {
      memory.push_back(rank == 0 ? input(DType::kU8, bytes(i), 0, uint64_t(i)) : Bytes(bytes(i)));
    }
    for (int i = 0; i < kCount; ++i) {
      all.push_back(request(1 - rank, 5, memory[size_t(i)]));
      rank == 0 ? group.mailbox().send(all.back(), Runner::kPool) : group.mailbox().receive(all.back(), Runner::kPool);
    }
    for (const auto& one : all) ASSERT_TRUE(group.mailbox().wait(*one).ok()) << one->status().what();
    for (int i = 0; rank == 1 && i < kCount; ++i) {
      ASSERT_EQ(memory[size_t(i)], input(DType::kU8, bytes(i), 0, uint64_t(i))) << i;
    }
  });
}

TEST(HierarchicalMessages, TagsAreApart) {
  Hosts hosts({0, 1});
  hosts.in_group("tags", [&](Group& group, int rank) {
    std::vector<Bytes> memory(20);
    std::vector<std::shared_ptr<Message>> all;
    for (int i = 0; i < 20; ++i) {
      const int tag = rank == 0 ? i : 19 - i;
      memory[size_t(i)] = rank == 0 ? input(DType::kU8, 2000, 0, uint64_t(tag)) : Bytes(2000);
      all.push_back(request(1 - rank, tag, memory[size_t(i)]));
      rank == 0 ? group.mailbox().send(all.back(), Runner::kCaller)
                : group.mailbox().receive(all.back(), Runner::kCaller);
    }
    for (const auto& one : all) ASSERT_TRUE(group.mailbox().wait(*one).ok()) << one->status().what();
    for (int i = 0; rank == 1 && i < 20; ++i) {
      EXPECT_EQ(memory[size_t(i)], input(DType::kU8, 2000, 0, uint64_t(19 - i)));
    }
  });
}

TEST(HierarchicalMessages, AnySourceEndsWhenNobodyIsLeftToSend) {
  Hosts hosts({0, 1, 2});
  std::atomic<bool> over{false};
  hosts.in_group("nobody", [&](Group& group, int rank) {
    ASSERT_TRUE(barrier(group).ok());
    if (rank != 0) {
      group.leave();
      EXPECT_TRUE(eventually(std::chrono::seconds(60), [&] { return over.load(); }));  // its process lives on
      return;
    }
    Bytes memory(10);
    const auto message = request(kAnySource, 1, memory);
    EXPECT_EQ(receive_now(group, message).code(), Code::kPeerLeft);
    over = true;
  });
}

TEST(HierarchicalMessages, AnySourceTakesFromBothSides) {
  constexpr int kRanks = 4, kEach = 20;
  Hosts hosts({0, 0, 1, 1});
  hosts.in_group("any", [&](Group& group, int rank) {
    std::vector<int> seen(kRanks);
    for (int i = 0; rank == 0 && i < (kRanks - 1) * kEach; ++i) {
      Bytes in(3000);
      const auto receiving = request(kAnySource, 1, in);
      ASSERT_TRUE(receive_now(group, receiving).ok()) << receiving->status().what();
      const int from = receiving->peer;
      ASSERT_EQ(in, input(DType::kU8, 3000, from, uint64_t(seen[size_t(from)]++)));
    }
    for (int i = 0; rank != 0 && i < kEach; ++i) {
      Bytes out = input(DType::kU8, 3000, rank, uint64_t(i));
      const auto sending = request(0, 1, out);
      ASSERT_TRUE(send_now(group, sending).ok()) << sending->status().what();
    }
    EXPECT_TRUE(rank != 0 || (seen[1] == kEach && seen[2] == kEach && seen[3] == kEach));
    ASSERT_TRUE(barrier(group).ok());
  });
}

TEST(HierarchicalMessages, AnotherSizeIsAMismatchThatNamesBoth) {
  for (const size_t bytes : {size_t(8), size_t(5000)}) {
    Hosts hosts({0, 1});
    hosts.in_group("sizes", [&](Group& group, int rank) {
      Bytes memory(bytes + size_t(rank));
      const auto one = request(1 - rank, 5, memory);
      Status status = rank == 0 ? send_now(group, one) : receive_now(group, one);
      if (rank == 0 && status.ok()) status = barrier(group);
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.what().find("send/recv mismatch"), std::string::npos) << status.what();
      EXPECT_NE(status.what().find("host0"), std::string::npos) << status.what();
      EXPECT_NE(status.what().find("host1"), std::string::npos) << status.what();
      EXPECT_NE(status.what().find("Next: give both tensors the same number"), std::string::npos) << status.what();
    });
  }
}

/// Small messages to a rank that receives none stay with their sender.
TEST(HierarchicalMessages, AFloodWaitsForItsReceiver) {
  constexpr int kCount = 3000;
  Hosts hosts({0, 1});
  std::atomic<bool> flooded{false};
  hosts.in_group("flood", [&](Group& group, int rank) {
    Bytes memory(500);
    std::vector<std::shared_ptr<Message>> all;
    if (rank == 0) {
      for (int i = 0; i < kCount; ++i) {
        all.push_back(request(1, 5, memory));
        group.mailbox().send(all.back(), Runner::kPool);
      }
      std::this_thread::sleep_for(milliseconds(100));
      EXPECT_LT(hosts.net().counts().bytes, uint64_t(200 * 500));
      flooded = true;
    }
    EXPECT_TRUE(eventually(milliseconds(10'000), [&] { return flooded.load(); }));
    for (int i = 0; rank == 1 && i < kCount; ++i) {
      const auto one = request(0, 5, memory);
      ASSERT_TRUE(receive_now(group, one).ok()) << one->status().what();
    }
    for (const auto& one : all) ASSERT_TRUE(group.mailbox().wait(*one).ok()) << one->status().what();
  });
}

/// Read reports carry counts: the latest count holds in any order of arrival, also when it wraps.
TEST(HierarchicalMessages, OldReportsChangeNothing) {
  net::Taken known{0xfffffff0u, 0xffffffffu};
  EXPECT_TRUE(known.full());
  const net::Taken later{8, 0}, latest{8, 1};
  known.update(net::Taken::of(latest.value()));
  EXPECT_EQ(known.count, 8u);
  EXPECT_TRUE(known.full());
  known.update(net::Taken::of(later.value()));
  EXPECT_TRUE(known.full());
  known.update({0xfffffff8u, 0xffffffffu});
  EXPECT_EQ(known.count, 8u);
  known.update({9, 2});
  EXPECT_EQ(known.count, 9u);
  EXPECT_FALSE(known.full());
}

/// A message that fits into an envelope needs no grant: one message over the network and no reply.
TEST(HierarchicalMessages, MessageThatFitsIntoAnEnvelopeNeedsNoGrant) {
  Hosts hosts({0, 1});
  hosts.in_group("envelope", [&](Group& group, int rank) {
    Bytes memory(net::Messenger::kMostCopied);
    const auto one = request(1 - rank, 5, memory);
    if (rank == 0) {
      group.mailbox().send(one, Runner::kPool);
      EXPECT_TRUE(one->done());
      ASSERT_TRUE(barrier(group).ok());
    } else {
      ASSERT_TRUE(barrier(group).ok());
      ASSERT_TRUE(receive_now(group, one).ok()) << one->status().what();
    }
  });
}

TEST(HierarchicalMessages, ALostPeerEndsWhatIsOpen) {
  for (const bool sends : {true, false}) {
    Hosts hosts({0, 1});
    hosts.in_group("lost", [&](Group& group, int rank) {
      if (rank == 1) return hosts.net().kill(1);
      Bytes memory(1 << 20);
      const auto one = request(1, 5, memory);
      const auto began = Clock::now();
      const Status status = sends ? send_now(group, one) : receive_now(group, one);
      EXPECT_LT(Clock::now() - began, milliseconds(3000));
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.what().find("rank 1 (pid"), std::string::npos) << status.what();
    });
  }
}

// --- concurrent operations

class QueuedCollective : public Task {
 public:
  QueuedCollective(Group& group, const Spec& spec)
      : side_(spec, group.rank(), group.size()), group_(group), operation_(operation_of(spec, side_, group.size())) {}
  void perform(Runner runner) override { status_ = group_.run(operation_, runner); }
  std::string verdict() { return status_.ok() ? side_.verdict() : status_.what(); }

 private:
  Side side_;
  Group& group_;
  Operation operation_;
  Status status_;
};

/// Groups of all and of some ranks, used on pool threads in an order that differs by rank, with messages in between.
TEST(HierarchicalGroups, AreIndependent) {
  Hosts hosts({0, 0, 1, 1}, disorderly());
  MemoryStore stores[3];
  const std::vector<int> members[3] = {{0, 1, 2, 3}, {1, 2}, {3, 0, 2}};
  as_threads(4, [&](int rank) {
    std::vector<std::unique_ptr<Group>> groups;
    for (size_t g = 0; g < 3; ++g) {
      const auto me = std::find(members[g].begin(), members[g].end(), rank);
      if (me == members[g].end()) continue;
      groups.push_back(
          std::make_unique<Group>(stores[g], hosts.options_of("group" + std::to_string(g), int(me - members[g].begin()),
                                                              int(members[g].size()), size_t(rank))));
    }
    for (uint64_t round = 0; round < 10; ++round) {
      std::vector<std::shared_ptr<QueuedCollective>> tasks;
      for (size_t i = 0; i < groups.size(); ++i) {
        Group& group = *groups[(i + size_t(rank) + round) % groups.size()];
        Spec spec{.collective = Collective::kAllReduce, .dtype = DType::kI32, .counts = {3000}};
        spec.round = round;
        tasks.push_back(std::make_shared<QueuedCollective>(group, spec));
        group.lane().submit(tasks.back());
      }
      for (size_t i = 0; i < groups.size(); ++i) {
        Group& group = *groups[(i + size_t(rank) + round) % groups.size()];
        ASSERT_TRUE(group.lane().wait(*tasks[i], Lane::MayRun::kNo, [] { return false; }));
        ASSERT_EQ(tasks[i]->verdict(), "");
      }
    }
    for (const auto& group : groups) ASSERT_TRUE(barrier(*group).ok());
  });
}

// --- sums

/// Whole numbers whose sums are exact in every type, so any order of addition gives the same bits.
Bytes whole_numbers(DType dtype, size_t n, int rank) {
  Bytes bytes(n * size_of(dtype));
  for (size_t i = 0; i < n; ++i) {
    const int value = int((i + size_t(rank)) % 3);  // at most 8 with four ranks
    std::byte* const at = bytes.data() + i * size_of(dtype);
    const auto put = [&](auto number) { std::memcpy(at, &number, sizeof number); };
    constexpr uint16_t kBF16[] = {0, 0x3f80, 0x4000}, kF16[] = {0, 0x3c00, 0x4000};
    constexpr uint8_t kE4M3[] = {0, 0x38, 0x40}, kE5M2[] = {0, 0x3c, 0x40};
    switch (dtype) {
      case DType::kF32: put(float(value)); break;
      case DType::kF64: put(double(value)); break;
      case DType::kC64: put(std::array{float(value), float(1 + value)}); break;
      case DType::kBF16: put(kBF16[value]); break;
      case DType::kF16: put(kF16[value]); break;
      case DType::kF8E4M3FN: put(kE4M3[value]); break;
      case DType::kF8E5M2: put(kE5M2[value]); break;
      default: put(int32_t(value)); break;
    }
  }
  return bytes;
}

TEST(HierarchicalSums, OfWholeNumbersAreExact) {
  const std::vector<int> shapes[] = {{0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 0, 1}};
  for (const std::vector<int>& shape : shapes) {
    Hosts hosts(shape);
    hosts.in_group("sums", [&](Group& group, int rank) {
      for (const DType dtype : {DType::kI32, DType::kF32, DType::kF64, DType::kC64, DType::kBF16, DType::kF16,
                                DType::kF8E4M3FN, DType::kF8E5M2}) {
        for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum}) {
          if (op == ReduceOp::kPremulSum && dtype == DType::kI32) continue;  // not defined
          for (const size_t n : {size_t(13), as_fast(50'000, 10'000)}) {
            std::vector<Bytes> inputs;
            for (int r = 0; r < 4; ++r) inputs.push_back(whole_numbers(dtype, n, r));
            Operation o;
            Bytes out(inputs[0].size());
            o.collective = Collective::kAllReduce;
            o.dtype = dtype;
            o.op = op;
            o.in = inputs[size_t(rank)].data();
            o.out = out.data();
            o.count = n;
            o.factor = 2;
            const Status status = group.execute(o);
            ASSERT_TRUE(status.ok()) << status.what();
            ASSERT_EQ(out, reduced(dtype, op, inputs, 0, n, {2, 2, 2, 2}))
                << name(dtype) << " " << name(op) << " " << n;
          }
        }
      }
      ASSERT_TRUE(barrier(group).ok());
    });
  }
}

TEST(HierarchicalSums, AreTheSameBitsOnAllRanks) {
  const std::vector<int> shapes[] = {{0, 0, 1, 1, 2}, {0, 1, 2, 3, 4}, {0, 0, 0, 1, 1}, {2, 1, 0, 1, 2}};
  for (const std::vector<int>& shape : shapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const size_t n : {size_t(7), size_t(4000), as_fast(300'001, 40'001)}) {
        Hosts hosts(shape, disorderly(64 << 10, 64 << 10));
        MemoryStore store;
        std::vector<Bytes> results(shape.size());
        as_threads(int(shape.size()), [&](int rank) {
          Group group(store, hosts.options("bits", rank));
          Bytes data = input(dtype, n, rank, 9);
          Operation o;
          o.collective = Collective::kAllReduce;
          o.dtype = dtype;
          o.op = ReduceOp::kAvg;
          o.in = o.out = data.data();
          o.count = n;
          ASSERT_TRUE(group.execute(o).ok());
          results[size_t(rank)] = data;
          ASSERT_TRUE(barrier(group).ok());
        });
        for (const Bytes& result : results) EXPECT_EQ(result, results[0]) << name(dtype) << " " << n;
      }
    }
  }
}

/// Each host sends its sum once and receives those of the others once: 2 (H - 1) / H of the tensor a host, plus
/// headers.
TEST(HierarchicalSums, CrossBetweenHostsOnce) {
  const size_t elements = as_fast(1'000'000, 200'000), bytes = 4 * elements;
  for (const auto& [host_of, times] : {std::pair<std::vector<int>, size_t>{{0, 0, 1, 1}, 2}, {{0, 0, 1, 1, 2, 2}, 4}}) {
    Hosts hosts(host_of);
    MemoryStore store;
    as_threads(hosts.ranks(), [&, times = times](int rank) {
      Group group(store, hosts.options("bytes", rank));
      ASSERT_TRUE(barrier(group).ok());
      static std::atomic<uint64_t> before;
      if (rank == 0) before = hosts.net().counts().bytes;
      ASSERT_TRUE(barrier(group).ok());
      ASSERT_EQ(perform(group, {.collective = Collective::kAllReduce, .dtype = DType::kI32, .counts = {elements}}), "");
      ASSERT_TRUE(barrier(group).ok());
      if (rank != 0) return;
      const uint64_t crossed = hosts.net().counts().bytes - before;
      EXPECT_GE(crossed, times * bytes);
      EXPECT_LE(crossed, times * bytes + 1000) << "headers, and the messages of two barriers";
    });
  }
}

}  // namespace
}  // namespace nvx::test
