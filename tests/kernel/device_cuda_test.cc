// The kernels on a device, all ranks of a group in one cooperative launch: the bodies that pushed_test.cc runs by
// threads, over plain memory of one device. Skipped, aloud, where there is none.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernel/launch_cuda.h"
#include "support/plays.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::DeviceShape;
using kernel::FusedRank;
using kernel::Job;
using kernel::Piece;
using kernel::Pushed;

/// Memory of the device, or of the host that the device reaches, until the test ends.
class DeviceMemory {
 public:
  enum class Where { kDevice, kPinned };
  DeviceMemory(size_t bytes, Where where) : where_(where) {
    const cudaError_t error = where == Where::kDevice ? cudaMalloc(&data_, bytes) : cudaMallocHost(&data_, bytes);
    EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
    EXPECT_EQ(cudaMemset(data_, 0, bytes), cudaSuccess);
  }
  ~DeviceMemory() { where_ == Where::kDevice ? cudaFree(data_) : cudaFreeHost(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  Where where_;
  void* data_ = nullptr;
};

std::unique_ptr<DeviceMemory> on_device(size_t bytes) {
  return std::make_unique<DeviceMemory>(bytes, DeviceMemory::Where::kDevice);
}

/// A channel of several ranks on one device.
class Fused {
 public:
  Fused(const DeviceShape& shape, uint32_t first_epoch) : shape_(shape) {
    const kernel::DevicePad pad{shape};
    const kernel::DeviceState state{shape};
    std::vector<std::byte> image(std::max(pad.offset(kernel::Part::kStaging), state.bytes()));
    std::vector<kernel::PeerPads> at;
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      pads_.push_back(on_device(pad.bytes()));
      states_.push_back(on_device(state.bytes()));
      controls_.push_back(std::make_unique<DeviceMemory>(sizeof(kernel::Control), DeviceMemory::Where::kPinned));
      at.push_back({pads_.back()->data(), nullptr});
    }
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      kernel::format_pad(shape, first_epoch, 0, image.data());
      std::byte* const own = pads_[r]->data();
      EXPECT_EQ(cudaMemcpy(own, image.data(), pad.offset(kernel::Part::kStaging), cudaMemcpyDefault), cudaSuccess);
      for (kernel::PeerPads& peer : at) peer.mine = own;
      kernel::format_state(shape, first_epoch, 0, at.data(), image.data());
      EXPECT_EQ(cudaMemcpy(states_[r]->data(), image.data(), state.bytes(), cudaMemcpyDefault), cudaSuccess);
    }
  }

  kernel::Control& control(uint32_t rank) { return *reinterpret_cast<kernel::Control*>(controls_[rank]->data()); }

  /// Runs one play on the ranks [0, present). Empty: all outputs are right.
  std::string run(Pushed algorithm, const Play& play, uint32_t present, uint64_t patience_ns) {
    std::vector<std::unique_ptr<Side>> sides;
    std::vector<std::unique_ptr<DeviceMemory>> held;
    std::vector<FusedRank> ranks;
    std::vector<std::byte*> outs;
    for (uint32_t r = 0; r < present; ++r) {
      sides.push_back(std::make_unique<Side>(play, int(r), int(shape_.ranks)));
      ranks.push_back(prepare(algorithm, *sides.back(), r, patience_ns, &held, &outs));
    }
    held.push_back(on_device(ranks.size() * sizeof(FusedRank)));
    EXPECT_EQ(cudaMemcpy(held.back()->data(), ranks.data(), ranks.size() * sizeof(FusedRank), cudaMemcpyDefault),
              cudaSuccess);
    const auto* at = reinterpret_cast<const FusedRank*>(held.back()->data());
    const Status status = kernel::launch_fused(at, present, shape_.blocks, nullptr);
    if (!status.ok()) return status.what();
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return cudaGetErrorString(error);
    for (uint32_t r = 0; r < present; ++r) {
      if (control(r).verdict.state != 0) return "rank " + std::to_string(r) + " has a verdict";
      const size_t bytes = sides[r]->out_bytes();
      EXPECT_EQ(cudaMemcpy(sides[r]->out(), outs[r], bytes, cudaMemcpyDefault), cudaSuccess);
      const std::string wrong = sides[r]->verdict();
      if (!wrong.empty()) return wrong;
    }
    return "";
  }

 private:
  /// Inputs go to the device, and pieces are moved to where they are there.
  FusedRank prepare(Pushed algorithm, Side& side, uint32_t rank, uint64_t patience_ns,
                    std::vector<std::unique_ptr<DeviceMemory>>* held, std::vector<std::byte*>* outs) {
    kernel::Work work = side.work();
    const size_t in_bytes = work.in ? work.count * side.width() : 0;
    const size_t shift = reinterpret_cast<uintptr_t>(work.in ? work.in : work.out) % 16;
    const auto copy_of = [&](const std::byte* from, size_t bytes) {
      held->push_back(on_device(bytes + 32));
      std::byte* const to = held->back()->data() + shift;
      EXPECT_EQ(cudaMemcpy(to, from ? from : to, from ? bytes : 0, cudaMemcpyDefault), cudaSuccess);
      return to;
    };
    std::byte* const in = copy_of(work.in, in_bytes);
    std::byte* const out = copy_of(nullptr, side.out_bytes());
    outs->push_back(out);
    std::vector<Piece> send(side.send()), recv(side.recv());
    for (Piece& p : send) p.data = p.data ? in + (p.data - work.in) : nullptr;
    for (Piece& p : recv) p.data = p.data ? out + (p.data - work.out) : nullptr;
    work.in = work.in ? in : nullptr, work.out = out;
    work.send = send.data(), work.recv = recv.data();
    std::vector<Piece> table(2 * size_t(shape_.ranks));
    Job job = kernel::job_of(algorithm, work, rank, shape_.ranks, side.width(), 0, table.data());
    job.patience_ns = patience_ns;
    EXPECT_TRUE(kernel::can_do(algorithm, job, shape_, table.data()));
    held->push_back(on_device(sizeof(Job) + table.size() * sizeof(Piece)));
    std::byte* const at = held->back()->data();
    EXPECT_EQ(cudaMemcpy(at, &job, sizeof job, cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(at + sizeof job, table.data(), table.size() * sizeof(Piece), cudaMemcpyDefault), cudaSuccess);
    auto* control_block = reinterpret_cast<kernel::Control*>(controls_[rank]->data());
    return {{shape_, rank, states_[rank]->data(), control_block},
            reinterpret_cast<const Job*>(at),
            1,
            reinterpret_cast<const Piece*>(at + sizeof job)};
  }

  DeviceShape shape_;
  std::vector<std::unique_ptr<DeviceMemory>> pads_, states_, controls_;
};

class Device : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device here (" << cudaGetErrorString(error) << "): the kernels are not run";
    }
  }
};

constexpr uint64_t kPatience = 20'000'000'000;

TEST_F(Device, EveryAlgorithmTypeAndOperatorFused) {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u}) {
    Fused fused({ranks, 2, 4096, 4096}, uint32_t(-40));
    uint64_t round = 0;
    for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
      for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
        if (!kernel::level().reduce(DType(t), ReduceOp(o))) continue;
        for (const Pushed algorithm : {Pushed::kReducePackets, Pushed::kReducePacketsTwoShot, Pushed::kReduceChunks}) {
          Play play{.collective = Collective::kAllReduce, .dtype = DType(t), .op = ReduceOp(o), .counts = {}};
          play.round = ++round;
          play.counts.assign(ranks, algorithm == Pushed::kReduceChunks ? 5003 : 771);
          play.shift = round % 3 == 0 ? 16 : 0;
          ASSERT_EQ(fused.run(algorithm, play, ranks, kPatience), "") << kernel::name(algorithm);
        }
      }
    }
  }
}

TEST_F(Device, EveryExchangeFused) {
  Fused fused({4, 3, 4096, 4096}, 0);
  uint64_t round = 0;
  for (const Collective collective : {Collective::kAllGather, Collective::kBroadcast, Collective::kAllToAll,
                                      Collective::kGather, Collective::kScatter, Collective::kBarrier}) {
    for (const Pushed algorithm : {Pushed::kExchangePackets, Pushed::kExchangeChunks}) {
      for (const size_t n : {size_t(1), size_t(37), size_t(5000)}) {
        Play play{.collective = collective, .counts = {n, n, n, n}, .round = ++round};
        if (collective == Collective::kBroadcast || collective >= Collective::kGather) play.root = int(round % 4);
        if (collective == Collective::kBarrier) play.root = -1, play.counts = {0, 0, 0, 0};
        play.shift = round % 2 * 4;
        ASSERT_EQ(fused.run(algorithm, play, 4, kPatience), "") << kernel::name(algorithm) << " " << describe(play);
      }
    }
  }
}

/// A rank that never comes: the kernel ends, its verdict names the rank, and the context works on.
TEST_F(Device, AnAbsentRankEndsInAVerdict) {
  Fused fused({3, 2, 256, 4096}, 0);
  const Play play{.collective = Collective::kAllReduce, .counts = {100, 100, 100}};
  EXPECT_EQ(fused.run(Pushed::kReducePackets, play, 2, 200'000'000), "rank 0 has a verdict");
  EXPECT_EQ(fused.control(0).verdict.peer, 2);
  EXPECT_EQ(fused.control(0).verdict.how, Waited::kTimedOut);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(Device, KernelsSayWhatTheyNeed) {
  std::vector<kernel::KernelFacts> facts;
  const Status status = kernel::load_cuda(&facts);
  ASSERT_TRUE(status.ok()) << status.what();
  for (const kernel::KernelFacts& f : facts) {
    std::printf("%-10s %3d registers, %5zu bytes local, %4d blocks at once\n", f.name, f.registers, f.local_bytes,
                f.resident);
    EXPECT_GE(f.resident, 1);
  }
}

}  // namespace
}  // namespace nvx::test
