#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu/cases.h"
#include "gpu/device.h"
#include "gpu/fused.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {

inline constexpr uint64_t kTimeoutNs = 20'000'000'000;

/// One rank's operations for a kernel: its tensors on the device, between guard bytes, and the jobs that describe them.
class RankProgram {
 public:
  RankProgram(uint32_t rank, uint32_t ranks, Heap& heap) : rank_(rank), ranks_(ranks), heap_(heap) {}

  void add(const Case& test_case, uint64_t timeout_ns = kTimeoutNs);
  /// Returns after the copy has completed.
  void upload() const;
  const std::vector<kernel::Job>& jobs() const { return jobs_; }
  const std::vector<kernel::Piece>& table() const { return table_; }

  /// Launches the operations, `at_once` of them in each launch.
  Status launch(const kernel::DeviceChannel& channel, size_t at_once, cudaStream_t stream) const;
  /// The operations [first, first + count), in one launch.
  Status launch_some(const kernel::DeviceChannel& channel, size_t first, size_t count, cudaStream_t stream) const;

  /// Call it after the kernel. Empty: every output is correct, and no other byte has changed.
  std::string verdict();
  /// Call it after a kernel that failed before it met its peers. Empty: no output was written, except where a rank may
  /// write its own piece without its peers.
  std::string untouched() const;

 private:
  /// A tensor of the host with its guard bytes, and its address on the device.
  struct Image {
    std::byte* host;
    std::byte* device;
    size_t bytes;
    std::byte* tensor() const { return device + kAround; }
    void bring() const;
    void fetch() const;
  };
  static constexpr size_t kAround = 64;  ///< that test::Tensor has on either side, at least
  struct PlacedCase {
    std::unique_ptr<test::Side> side;
    std::string text;
    std::vector<Image> images;
    std::byte* out = nullptr;  ///< on the device
    bool keeps_own = false;    ///< its own piece may come into the output first
  };
  Image image_of(std::byte* tensor, size_t bytes);

  uint32_t rank_;
  uint32_t ranks_;
  Heap& heap_;
  std::vector<PlacedCase> placed_;
  std::vector<kernel::Job> jobs_;
  std::vector<kernel::Piece> table_;
};

/// The verdict of a rank's kernel that gave up; empty if it did not.
std::string verdict_of(const kernel::Control& control);

/// The ranks of a channel in one process and on one device.
class World : public TestChannel {
 public:
  /// The way in which kernels of several ranks run concurrently.
  enum class How {
    kFused,    ///< in one cooperative launch
    kStreams,  ///< each on a stream of its own, an operation a launch
    kBatches,  ///< ... all of a rank's operations in one launch
    kThreads,  ///< ... launched by a thread a rank
  };
  World(const ChannelShape& shape, How how, size_t heap_bytes = size_t(128) << 20);
  ~World() override;

  std::string perform(const std::vector<Case>& cases) override;

  // The steps of perform(), for tests that act in between.
  std::vector<RankProgram> write(const std::vector<Case>& cases, uint64_t timeout_ns = kTimeoutNs);
  /// Launches the programs of the ranks [0, present). Throws Error if a launch is refused.
  void launch(const std::vector<RankProgram>& programs, uint32_t present);
  /// Empty: all kernels have ended. Otherwise the running kernels and all their memory are leaked.
  std::string wait(std::chrono::milliseconds most);
  std::string verdict(std::vector<RankProgram>& programs);

  kernel::DeviceChannel channel(uint32_t rank) const;
  kernel::Control& control(uint32_t rank) const { return *reinterpret_cast<kernel::Control*>(controls_[rank]->data()); }
  const kernel::DeviceShape& shape() const { return shape_; }
  const Stream& stream(uint32_t rank) const { return *streams_[rank]; }
  Heap& heap() { return *heap_; }
  size_t pad_bytes() const { return pads_[0]->bytes(); }

  /// Copies the jobs of several ranks to where a fused launch reads them.
  const FusedRank* fuse(const std::vector<RankProgram>& programs, uint32_t present);

 private:
  kernel::DeviceShape shape_;
  How how_;
  std::vector<std::unique_ptr<Memory>> pads_, states_, controls_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::unique_ptr<Heap> heap_;
  bool hangs_ = false;
};

/// The name of a reducing algorithm in tables.
inline const char* short_name(kernel::DeviceAlgorithm algorithm) {
  if (algorithm == kernel::DeviceAlgorithm::kReducePackets) return "one_shot";
  return algorithm == kernel::DeviceAlgorithm::kReducePacketsTwoShot ? "two_shot" : "chunks";
}

/// The number of blocks of the largest kernel that the device runs at once. Loads all kernels. Throws Error.
uint32_t resident_blocks();

/// The shape that a group of so many ranks on this device chooses; with other blocks, if they are given.
kernel::DeviceShape product_shape(uint32_t ranks, uint32_t blocks = 0);

}  // namespace nvx::gpu
