// Sums by the switch on host threads: every rank has the same bits, near the reference, at every length and alignment,
// beside other algorithms of the channel; and a rank that is missing ends the others.

#include "kernel/gpu/multicast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "support/epochs.h"
#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::test {
namespace {

using kernel::MulticastView;

/// The parts of all ranks, and an address for all that no access may use by itself.
class Switch {
 public:
  Switch(int ranks, size_t bytes) : bytes_(bytes), all_(bytes), parts_(size_t(ranks), Bytes(bytes)) {}
  MulticastView view(int rank) { return {all_.data(), parts_[size_t(rank)].data(), bytes_}; }
  InjectedFault serve(InjectedFault fault) {
    fault.parts = [this](const void* at) {
      const auto offset = static_cast<const std::byte*>(at) - all_.data();
      EXPECT_TRUE(offset >= 0 && size_t(offset) + 16 <= bytes_);
      std::vector<std::byte*> at_all;
      for (Bytes& part : parts_) at_all.push_back(part.data() + offset);
      return at_all;
    };
    return fault;
  }

 private:
  size_t bytes_;
  alignas(16) Bytes all_;
  std::vector<Bytes> parts_;
};

/// An all_reduce of one rank, and its result as numbers.
struct Sum {
  Spec spec;
  Side side;
  Job job;
  Sum(const Spec& spec, int rank, int ranks) : spec(spec), side(spec, rank, ranks) {
    kernel::Piece none[2 * kernel::kMostRanks];
    job = kernel::job_of(DeviceAlgorithm::kReduceMulticast, side.args(), uint32_t(rank), uint32_t(ranks), side.width(),
                         0, none);
    job.timeout_ns = kTimeout;
  }
  Bytes result() const { return Bytes(side.out(), side.out() + side.count() * side.width()); }
};

double number(DType dtype, const std::byte* at) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return double(kernel::Rule<T>::widen(value));
  };
  return dtype == DType::kF32 ? read(float()) : dtype == DType::kBF16 ? read(kernel::BF16()) : read(kernel::F16());
}

/// The distance of a result from the exact sum, in steps of the type at the sum of magnitudes.
double off_by(const Spec& spec, int ranks, const Bytes& result) {
  const size_t width = size_of(spec.dtype), count = spec.counts[0];
  const double step = spec.dtype == DType::kF32 ? 0x1p-23 : spec.dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
  std::vector<double> sum(count), most(count);
  for (int r = 0; r < ranks; ++r) {
    const Bytes in = input(spec.dtype, count, r, spec.round, spec.nature);
    for (size_t i = 0; i < count; ++i) {
      const double x = number(spec.dtype, in.data() + i * width);
      sum[i] += x, most[i] += std::abs(x);
    }
  }
  double worst = 0;
  for (size_t i = 0; i < count; ++i) {
    const double off = std::abs(number(spec.dtype, result.data() + i * width) - sum[i]) / (step * most[i]);
    worst = std::isfinite(off) ? std::max(worst, off) : INFINITY;
  }
  return worst;
}

class Multicasts : public testing::TestWithParam<std::tuple<int, uint32_t>> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Multicasts,
                         testing::Combine(testing::Values(2, 3, 8), testing::ValuesIn(first_epochs())),
                         [](const auto& info) { return name_of(std::get<0>(info.param), std::get<1>(info.param)); });

TEST_P(Multicasts, AllRanksHaveTheSameSumsAtAnyLengthAndAddress) {
  const int ranks = std::get<0>(GetParam());
  const uint32_t first = std::get<1>(GetParam());
  constexpr uint32_t kBlocks = 2;
  SimulatedDevices devices(
      {{uint32_t(ranks), kBlocks, 128, 256}, 3, first, first == 0 ? Stamp(0) : (Stamp(1) << 32) - 5});
  Switch nvswitch(ranks, 4 * kBlocks * 256);
  EXPECT_EQ(nvswitch.view(0).slot(kBlocks), 256u);
  std::vector<Spec> specs;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const size_t n : {size_t(0), size_t(1), size_t(7), size_t(64), size_t(129), size_t(777), size_t(4096)}) {
      Spec spec = spec_of(Collective::kAllReduce, n, ranks, specs.size());
      spec.dtype = dtype, spec.shift = specs.size() % 5, spec.in_place = specs.size() % 3 == 0;
      specs.push_back(spec);
    }
  }
  std::mutex mutex;
  std::map<size_t, std::vector<Bytes>> results;
  as_threads(ranks, [&](int rank) {
    devices.fault(rank) = {InjectedFault::Kind::kNone, 20u << rank % 4, uint64_t(rank)};
    const InjectedFault fault = nvswitch.serve(devices.fault(rank));
    for (size_t i = 0; i < specs.size(); ++i) {
      Sum sum(specs[i], rank, ranks);
      ASSERT_TRUE(kernel::check_multicast(devices.channel(rank), sum.job, nvswitch.view(rank)).ok());
      const int well = simulate_multicast(devices.channel(rank), sum.job, nvswitch.view(rank), 3, fault);
      ASSERT_EQ(well, devices.lanes_in_all()) << describe(specs[i]);
      {
        const std::lock_guard lock(mutex);
        results[i].push_back(sum.result());
      }
      if (i % 4 != 0) continue;  // other operations of the channel in between
      Batch batch(devices, rank);
      batch.add(i % 8 == 0 ? DeviceAlgorithm::kReduceChunks : DeviceAlgorithm::kReducePackets,
                spec_of(Collective::kAllReduce, 40, ranks, i));
      ASSERT_EQ(batch.run(), "");
    }
  });
  for (const auto& [i, all] : results) {
    ASSERT_EQ(all.size(), size_t(ranks));
    for (const Bytes& one : all) EXPECT_EQ(one, all[0]) << describe(specs[i]);
    EXPECT_LT(off_by(specs[i], ranks, all[0]), ranks) << describe(specs[i]);
  }
  EXPECT_TRUE(devices.guards_are_whole()) << "a kernel wrote outside its memory";
}

/// A launch may report its end to the host.
TEST(Multicast, ReportsItsEndToTheHost) {
  SimulatedDevices devices({{2, 2, 128, 256}, 2, 0, 0});
  Switch nvswitch(2, 4096);
  Stamp completions[2] = {};
  as_threads(2, [&](int rank) {
    Sum sum(spec_of(Collective::kAllReduce, 100, 2, 0), rank, 2);
    kernel::DeviceChannel channel = devices.channel(rank);
    channel.completion = &completions[rank], channel.completion_value = 7;
    EXPECT_EQ(simulate_multicast(channel, sum.job, nvswitch.view(rank), 2, nvswitch.serve({})), devices.lanes_in_all());
    EXPECT_EQ(completions[rank], 7u);
  });
}

TEST(Multicast, AMissingRankIsNamedAndNothingIsStored) {
  SimulatedDevices devices({{3, 1, 128, 256}, 2, 0, 0});
  Switch nvswitch(3, 4096);
  as_threads(2, [&](int rank) {
    Sum sum(spec_of(Collective::kAllReduce, 100, 3, 0), rank, 3);
    const Bytes before = sum.result();
    sum.job.timeout_ns = 150 * kMillisecond;
    EXPECT_EQ(simulate_multicast(devices.channel(rank), sum.job, nvswitch.view(rank), 2, nvswitch.serve({})), 0);
    EXPECT_EQ(devices.control(rank).verdict.peer, 2);
    EXPECT_EQ(sum.result(), before);
  });
}

/// A rank that chose another algorithm for the call is an error: it would wait for other data.
TEST(Multicast, ARankWithAnotherAlgorithmIsAMismatch) {
  SimulatedDevices devices({{2, 1, 128, 256}, 2, 0, 0});
  Switch nvswitch(2, 4096);
  const Spec spec = spec_of(Collective::kAllReduce, 100, 2, 0);
  as_threads(2, [&](int rank) {
    if (rank == 0) {
      Sum sum(spec, rank, 2);
      EXPECT_EQ(simulate_multicast(devices.channel(rank), sum.job, nvswitch.view(rank), 2, nvswitch.serve({})), 0);
    } else {
      Batch batch(devices, rank);
      batch.add(DeviceAlgorithm::kReduceChunks, spec);
      EXPECT_NE(batch.run(), "");
    }
    EXPECT_EQ(devices.control(rank).verdict.cause, kernel::Verdict::Cause::kMismatch);
  });
}

TEST(Multicast, LaunchesRefuseWhatItCannotDo) {
  SimulatedDevices devices({{2, 2, 128, 256}, 2, 0, 0});
  Switch nvswitch(2, 4096);
  const auto refusal = [&](const Spec& spec, const MulticastView& view, const auto& change) {
    Sum sum(spec, 0, 2);
    change(sum.job);
    const Status status = kernel::check_multicast(devices.channel(0), sum.job, view);
    return status.ok() ? "nothing" : status.what();
  };
  const auto as_is = [](Job&) {};
  Spec spec = spec_of(Collective::kAllReduce, 8, 2, 0);
  EXPECT_EQ(refusal(spec, nvswitch.view(0), as_is), "nothing");
  const auto expect = [](const std::string& text, const std::string& why) {
    EXPECT_NE(text.find(why), std::string::npos) << text;
  };
  expect(refusal(spec, {}, as_is), "it has no multicast memory");
  MulticastView small = nvswitch.view(0);
  small.bytes = 4 * 2 * 64 - 1;
  expect(refusal(spec, small, as_is), "it has no multicast memory");
  expect(refusal(spec, nvswitch.view(0), [](Job& job) { job.recv.bytes -= 4; }), "differ in length");
  expect(refusal(spec, nvswitch.view(0), [](Job& job) { job.send.base = nullptr; }), "a piece without memory");
  expect(refusal(spec, nvswitch.view(0), [](Job& job) { job.algorithm = DeviceAlgorithm::kReduceChunks; }),
         "of its types");
  spec.op = ReduceOp::kAvg;
  expect(refusal(spec, nvswitch.view(0), as_is), "it is not an all_reduce of a sum of its types");
  spec.op = ReduceOp::kSum, spec.dtype = DType::kI32;
  expect(refusal(spec, nvswitch.view(0), as_is), "it is not an all_reduce of a sum of its types");
  Batch batch(devices, 0);
  batch.add(DeviceAlgorithm::kReduceMulticast, spec_of(Collective::kAllReduce, 8, 2, 0));
  EXPECT_FALSE(batch.fits()) << "not in a launch of other kernels";
}

}  // namespace
}  // namespace nvx::test
