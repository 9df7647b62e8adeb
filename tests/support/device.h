#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernel/gpu/launch_cuda.h"
#include "support/specs.h"

/// The device algorithms on a device: the memory of ranks that share it, and their sides of operations.
namespace nvx::test {

inline constexpr uint64_t kDeviceTimeout = 20'000'000'000;  // ns

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

inline std::unique_ptr<DeviceMemory> on_device(size_t bytes) {
  return std::make_unique<DeviceMemory>(bytes, DeviceMemory::Where::kDevice);
}

/// Copies between host and device. An empty copy makes no call.
inline void copy_over(void* to, const void* from, size_t bytes) {
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

}  // namespace nvx::test
