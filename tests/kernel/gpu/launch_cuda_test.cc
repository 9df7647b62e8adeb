// launch_cuda() on a device: each rank's kernel on its own stream, as with ranks of one process that share a GPU. Every
// kernel, alone and in CUDA graphs. Skipped with a message if there is no device.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/residency.h"
#include "support/specs.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceVerdict;
using kernel::Job;
using kernel::Piece;

constexpr uint64_t kDeviceTimeout = 20'000'000'000;  // ns

/// Device memory, or host memory that the device can access, for the duration of the test.
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

/// Copies between host and device. An empty copy makes no call.
void copy_over(void* to, const void* from, size_t bytes) {
  const cudaError_t error = bytes == 0 ? cudaSuccess : cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

/// A channel of several ranks on one device.
class DeviceRanks {
 public:
  DeviceRanks(const kernel::DeviceShape& shape, uint32_t first_epoch) : shape_(shape) {
    const kernel::DevicePad pad{shape};
    const kernel::DeviceState state{shape};
    std::vector<std::byte> image(std::max(pad.offset(kernel::Part::kStaging), state.bytes()));
    kernel::format_pad(shape, first_epoch, 0, image.data());
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      pads_.push_back(on_device(pad.bytes()));
      states_.push_back(on_device(state.bytes()));
      controls_.push_back(std::make_unique<DeviceMemory>(sizeof(kernel::Control), DeviceMemory::Where::kPinned));
      copy_over(pads_[r]->data(), image.data(), pad.offset(kernel::Part::kStaging));
    }
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      std::vector<kernel::PeerPads> peers;
      for (const auto& theirs : pads_) peers.push_back({theirs->data(), pads_[r]->data()});
      kernel::format_state(shape, first_epoch, 0, peers.data(), image.data());
      copy_over(states_[r]->data(), image.data(), state.bytes());
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  const kernel::DeviceShape& shape() const { return shape_; }
  kernel::Control& control(uint32_t rank) { return *reinterpret_cast<kernel::Control*>(controls_[rank]->data()); }
  kernel::DeviceChannel channel(uint32_t rank) { return {shape_, rank, states_[rank]->data(), &control(rank)}; }

 private:
  kernel::DeviceShape shape_;
  std::vector<std::unique_ptr<DeviceMemory>> pads_, states_, controls_;
};

/// One rank's side of a spec, with its memory on the device.
class KernelExecutor {
 public:
  KernelExecutor(const Spec& spec, uint32_t rank, uint32_t ranks)
      : side_(spec, int(rank), int(ranks)), rank_(rank), ranks_(ranks) {
    const kernel::CollectiveArgs args = side_.args();
    const size_t in_bytes = args.in ? args.count * side_.width() : 0;
    const size_t shift = reinterpret_cast<uintptr_t>(args.in ? args.in : args.out) % 16;
    in_memory_ = on_device(in_bytes + 32);
    out_memory_ = on_device(side_.out_bytes() + 32);
    in_ = in_memory_->data() + shift, out_ = out_memory_->data() + shift;
    copy_over(in_, args.in, in_bytes);
  }

  /// The job, whose pieces are listed from table[index] on; `table` has space for 2 * ranks there.
  kernel::Job job(kernel::DeviceAlgorithm algorithm, uint64_t timeout_ns, uint32_t index, kernel::Piece* table) const {
    kernel::CollectiveArgs args = side_.args();
    std::vector<kernel::Piece> send(side_.send()), recv(side_.recv());
    for (kernel::Piece& p : send) p.data = p.data ? in_ + (p.data - args.in) : nullptr;
    for (kernel::Piece& p : recv) p.data = p.data ? out_ + (p.data - args.out) : nullptr;
    args.in = args.in ? in_ : nullptr, args.out = out_;
    args.send = send.data(), args.recv = recv.data();
    kernel::Job job = kernel::job_of(algorithm, args, rank_, ranks_, side_.width(), index, table + index);
    job.timeout_ns = timeout_ns;
    return job;
  }

  /// Clears the output, before it is written again.
  void spoil() { EXPECT_EQ(cudaMemset(out_, 0xEE, side_.out_bytes()), cudaSuccess); }
  bool is_spoilt() const {
    std::vector<std::byte> found(side_.out_bytes());
    copy_over(found.data(), out_, found.size());
    return std::all_of(found.begin(), found.end(), [](std::byte b) { return b == std::byte(0xEE); });
  }
  /// The error in the output, or an empty text.
  std::string verdict() {
    copy_over(side_.out(), out_, side_.out_bytes());
    return side_.verdict();
  }

 private:
  Side side_;
  uint32_t rank_, ranks_;
  std::unique_ptr<DeviceMemory> in_memory_, out_memory_;
  std::byte *in_, *out_;
};

/// Skips the test, with a message, if there is no device.
class Device : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no CUDA device here (" << cudaGetErrorString(error) << "): the kernels are not run";
    }
    // Loading a kernel may wait for running kernels, which may wait for the kernel.
    const Status loaded = kernel::load_cuda(&attributes_);
    ASSERT_TRUE(loaded.ok()) << loaded.what();
  }

  std::vector<kernel::KernelAttributes> attributes_;
};

/// A stream that does not synchronise with the default stream.
class Stream {
 public:
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Operations of all ranks, in memory that exists from before the first kernel until after the last. Nothing between
/// two launches may wait for a kernel that waits for the second.
class Operations {
 public:
  using Plan = std::vector<std::pair<DeviceAlgorithm, Spec>>;

  Operations(DeviceRanks& ranks, const Plan& plan, uint64_t timeout_ns) : ranks_(ranks) {
    const uint32_t n = ranks.shape().ranks;
    for (uint32_t r = 0; r < n; ++r) {
      tables_.emplace_back(2 * n * plan.size());
      jobs_.emplace_back();
      sides_.emplace_back();
      for (const auto& [algorithm, spec] : plan) {
        sides_[r].push_back(std::make_unique<KernelExecutor>(spec, r, n));
        const uint32_t index = uint32_t(2 * n * jobs_[r].size());
        jobs_[r].push_back(sides_[r].back()->job(algorithm, timeout_ns, index, tables_[r].data()));
      }
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  Status launch(uint32_t rank, cudaStream_t stream) {
    return kernel::launch_cuda(ranks_.channel(rank), jobs_[rank], tables_[rank], stream);
  }
  void spoil() {
    for (auto& of_rank : sides_) {
      for (auto& side : of_rank) side->spoil();
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  /// Whether nothing of a rank has been written since.
  bool is_spoilt(uint32_t rank) const {
    return std::all_of(sides_[rank].begin(), sides_[rank].end(), [](const auto& side) { return side->is_spoilt(); });
  }
  /// The error in the outputs of all ranks, or an empty text.
  std::string verdict() {
    for (uint32_t r = 0; r < ranks_.shape().ranks; ++r) {
      const DeviceVerdict& v = ranks_.control(r).verdict;
      if (v.state != 0) return "rank " + std::to_string(r) + " gave up on rank " + std::to_string(v.peer);
      for (auto& side : sides_[r]) {
        const std::string wrong = side->verdict();
        if (!wrong.empty()) return wrong;
      }
    }
    return "";
  }

 private:
  DeviceRanks& ranks_;
  std::vector<std::vector<Piece>> tables_;
  std::vector<std::vector<Job>> jobs_;
  std::vector<std::vector<std::unique_ptr<KernelExecutor>>> sides_;
};

class LaunchCuda : public Device {
 protected:
  void SetUp() override {
    Device::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const kernel::GpuCapacity room[] = {{kernel::resident_at_once(attributes_), kRanks}};
    const kernel::BlockAgreement agreed = kernel::agree_on_blocks(room, 2);
    ASSERT_GT(agreed.blocks, 0u) << agreed.why_fewer;
    shape_ = {kRanks, agreed.blocks, 4096, 4096};
    for (uint32_t r = 0; r < kRanks; ++r) streams_.push_back(std::make_unique<Stream>());
  }

  /// Launches all ranks' kernels at once and waits for them. Returns an empty text on success.
  std::string run(Operations& operations) {
    for (uint32_t r = 0; r < kRanks; ++r) {
      const Status status = operations.launch(r, streams_[r]->get());
      if (!status.ok()) return status.what();
    }
    return finish(operations);
  }
  std::string finish(Operations& operations) {
    const cudaError_t error = cudaDeviceSynchronize();
    return error == cudaSuccess ? operations.verdict() : cudaGetErrorString(error);
  }
  std::string run(DeviceRanks& ranks, const Operations::Plan& plan) {
    Operations operations(ranks, plan, kDeviceTimeout);
    return run(operations);
  }

  static Spec spec(Collective collective, size_t n, uint64_t round) {
    Spec spec{.collective = collective, .counts = {n, n, n}, .round = round};
    if (collective == Collective::kBroadcast || collective == Collective::kGather) spec.root = int(round % kRanks);
    spec.shift = round % 2 * 4;
    return spec;
  }

  static constexpr uint32_t kRanks = 3;
  kernel::DeviceShape shape_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

TEST_F(LaunchCuda, EachReductionAlone) {
  DeviceRanks ranks(shape_, uint32_t(-9));
  uint64_t round = 0;
  for (const size_t n : {size_t(1), size_t(771), size_t(1500)}) {
    for (const DeviceAlgorithm algorithm :
         {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot, DeviceAlgorithm::kReduceChunks}) {
      ASSERT_EQ(run(ranks, {{algorithm, spec(Collective::kAllReduce, n, ++round)}}), "") << kernel::name(algorithm);
    }
  }
  ASSERT_EQ(run(ranks, {{DeviceAlgorithm::kReduceChunks, spec(Collective::kAllReduce, 300'000, ++round)}}), "");
}

TEST_F(LaunchCuda, EachExchangeAlone) {
  DeviceRanks ranks(shape_, uint32_t(-9));
  uint64_t round = 0;
  for (const Collective collective : {Collective::kAllGather, Collective::kBroadcast, Collective::kAllToAll}) {
    for (const DeviceAlgorithm algorithm : {DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks}) {
      ASSERT_EQ(run(ranks, {{algorithm, spec(collective, 1000, ++round)}}), "") << kernel::name(algorithm);
    }
    ASSERT_EQ(run(ranks, {{DeviceAlgorithm::kExchangeChunks, spec(collective, 100'000, ++round)}}), "");
  }
}

TEST_F(LaunchCuda, SeveralOperationsInOneLaunch) {
  DeviceRanks ranks(shape_, 0);
  Operations::Plan plan;
  for (uint64_t round = 0; round < 3; ++round) {
    plan.emplace_back(DeviceAlgorithm::kReducePackets, spec(Collective::kAllReduce, 100, round));
    plan.emplace_back(DeviceAlgorithm::kExchangeChunks, spec(Collective::kAllToAll, 20'000, round));
    plan.emplace_back(DeviceAlgorithm::kExchangePackets, spec(Collective::kBroadcast, 64, round));
    plan.emplace_back(DeviceAlgorithm::kReduceChunks, spec(Collective::kAllReduce, 20'000, round));
  }
  ASSERT_EQ(run(ranks, plan), "");
  for (uint32_t r = 0; r < kRanks; ++r)
    EXPECT_EQ(kernel::least_ended(ranks.control(r), ranks.shape().blocks).epoch, plan.size());
}

TEST_F(LaunchCuda, AnAbsentRankEndsInAVerdict) {
  DeviceRanks ranks(shape_, 6);
  Operations operations(ranks, {{DeviceAlgorithm::kReducePackets, spec(Collective::kAllReduce, 100, 0)}}, 200'000'000);
  for (uint32_t r = 0; r + 1 < kRanks; ++r) ASSERT_TRUE(operations.launch(r, streams_[r]->get()).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << "and the context works on";
  for (uint32_t r = 0; r + 1 < kRanks; ++r) {
    const DeviceVerdict& v = ranks.control(r).verdict;
    EXPECT_EQ(v.state, DeviceVerdict::kReadable);
    EXPECT_EQ(v.how, Waited::kTimedOut);
    EXPECT_EQ(v.peer, int(kRanks) - 1);
    EXPECT_EQ(v.epoch, 7u);
  }
}

/// A kernel that waits for an absent rank ends when the host aborts it. Later launches write nothing, whether they
/// would have to wait or not.
TEST_F(LaunchCuda, TheAbortWordEndsAWaitAndWhatComesAfterIt) {
  DeviceRanks ranks(shape_, 0);
  Operations sum(ranks, {{DeviceAlgorithm::kReduceChunks, spec(Collective::kAllReduce, 100, 0)}}, kDeviceTimeout);
  Operations later(ranks, {{DeviceAlgorithm::kExchangePackets, spec(Collective::kAllGather, 100, 0)}}, kDeviceTimeout);
  sum.spoil(), later.spoil();
  const auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(sum.launch(0, streams_[0]->get()).ok());
  ASSERT_TRUE(later.launch(0, streams_[0]->get()).ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(cudaStreamQuery(streams_[0]->get()), cudaErrorNotReady);
  std::atomic_ref(ranks.control(0).abort).store(1);
  ASSERT_EQ(cudaStreamSynchronize(streams_[0]->get()), cudaSuccess);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  EXPECT_EQ(ranks.control(0).verdict.how, Waited::kAlarmed);
  EXPECT_EQ(ranks.control(0).verdict.epoch, 1u);
  EXPECT_TRUE(sum.is_spoilt(0) && later.is_spoilt(0));
}

/// Between pinned host memory and device memory, when the host permits it, beside another rank's kernels.
TEST_F(LaunchCuda, MovesWaitForTheHostAndBringWhatItHasWritten) {
  constexpr size_t kBytes = 100'003;
  DeviceRanks ranks(shape_, uint32_t(-2));
  DeviceMemory host(2 * kBytes + 64, DeviceMemory::Where::kPinned), device(kBytes + 64, DeviceMemory::Where::kDevice);
  Stamp& counter = *reinterpret_cast<Stamp*>(host.data());
  std::byte *const there = host.data() + 64, *const back = there + kBytes;
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (Stamp turn = 1; turn < 8; ++turn) {
    const size_t shift = turn % 4;
    const std::pair<std::byte*, std::byte*> ways[] = {{there, device.data() + shift}, {device.data() + shift, back}};
    for (uint32_t r = 0; r < kRanks; ++r) {
      for (const auto& [from, to] : ways) {
        std::vector<Piece> table(2);
        const Piece source{from, r == 0 ? kBytes : 0}, target{to, source.bytes};
        Job move = kernel::job_of_moves({&source, 1}, {&target, 1}, 0, table.data());
        if (to != back) move.awaited = &counter, move.awaits = turn;
        ASSERT_TRUE(kernel::launch_cuda(ranks.channel(r), {&move, 1}, table, streams_[r]->get()).ok());
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(cudaStreamQuery(streams_[0]->get()), cudaErrorNotReady) << "nothing has released it";
    for (size_t i = 0; i < kBytes; ++i) there[i] = std::byte(i * turn);
    std::atomic_ref(counter).store(turn, std::memory_order_release);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(std::equal(there, there + kBytes, back)) << "turn " << turn;
  }
}

/// Aborted before the launch: a root, which would wait for none, reports it and sends nothing.
TEST_F(LaunchCuda, AnAbortedRankBeginsNothing) {
  DeviceRanks ranks(shape_, 0);
  Operations operations(ranks, {{DeviceAlgorithm::kExchangePackets, spec(Collective::kBroadcast, 100, 0)}},
                        kDeviceTimeout);
  operations.spoil();
  std::atomic_ref(ranks.control(0).abort).store(1);
  ASSERT_TRUE(operations.launch(0, streams_[0]->get()).ok());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(ranks.control(0).verdict.how, Waited::kAlarmed);
  EXPECT_EQ(ranks.control(0).verdict.peer, -1);
  EXPECT_TRUE(operations.is_spoilt(0));
}

/// One rank's operations, captured.
class Graph {
 public:
  Graph(Operations& operations, uint32_t rank, cudaStream_t stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    const Status status = operations.launch(rank, stream);
    EXPECT_TRUE(status.ok()) << status.what();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&ready_, graph_, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphUpload(ready_, stream), cudaSuccess);
  }
  ~Graph() { cudaGraphExecDestroy(ready_), cudaGraphDestroy(graph_); }
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream) { EXPECT_EQ(cudaGraphLaunch(ready_, stream), cudaSuccess); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

/// A replay contains no epoch of its capture, so replays and eager calls may follow each other freely.
TEST_F(LaunchCuda, GraphsReplayAmongEagerCalls) {
  DeviceRanks ranks(shape_, uint32_t(-3));
  Operations captured(ranks,
                      {{DeviceAlgorithm::kReducePackets, spec(Collective::kAllReduce, 500, 1)},
                       {DeviceAlgorithm::kExchangeChunks, spec(Collective::kAllGather, 9000, 2)}},
                      kDeviceTimeout);
  Operations eager(ranks, {{DeviceAlgorithm::kReducePacketsTwoShot, spec(Collective::kAllReduce, 700, 3)}},
                   kDeviceTimeout);
  std::vector<std::unique_ptr<Graph>> graphs;
  for (uint32_t r = 0; r < kRanks; ++r) graphs.push_back(std::make_unique<Graph>(captured, r, streams_[r]->get()));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (uint32_t r = 0; r < kRanks; ++r)
    EXPECT_EQ(kernel::least_ended(ranks.control(r), ranks.shape().blocks).epoch, 0u) << "capturing runs nothing";
  for (int replay = 0; replay < 3; ++replay) {
    captured.spoil(), eager.spoil();
    for (uint32_t r = 0; r < kRanks; ++r) graphs[r]->launch(streams_[r]->get());
    ASSERT_EQ(finish(captured), "") << "replay " << replay;
    for (int i = 0; i <= replay; ++i) ASSERT_EQ(run(eager), "") << "after replay " << replay;
  }
}

/// A refused launch never reaches the device.
TEST_F(LaunchCuda, RefusesBeforeItLaunches) {
  DeviceRanks ranks(shape_, 0);
  kernel::DeviceChannel channel = ranks.channel(0);
  channel.rank = kRanks;
  const Job job;
  const Status status = kernel::launch_cuda(channel, {&job, 1}, {}, streams_[0]->get());
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kInvalid);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace nvx::test
