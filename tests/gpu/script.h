#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "gpu/cases.h"
#include "gpu/device.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {

inline constexpr uint64_t kPatienceNs = 20'000'000'000;

/// One rank's side of operations that a kernel runs: its tensors on the device, with painted bytes around them, and
/// the jobs that say so.
class Script {
 public:
  Script(uint32_t rank, uint32_t ranks, Heap& heap) : rank_(rank), ranks_(ranks), heap_(heap) {}

  void add(const Act& act, uint64_t patience_ns = kPatienceNs);
  /// Returns when it is there.
  void upload() const;
  const std::vector<kernel::Job>& jobs() const { return jobs_; }
  const std::vector<kernel::Piece>& table() const { return table_; }

  /// So many operations in each launch.
  Status launch(const kernel::DeviceChannel& channel, size_t at_once, cudaStream_t stream) const;
  /// The operations [first, first + count), in one launch.
  Status launch_some(const kernel::DeviceChannel& channel, size_t first, size_t count, cudaStream_t stream) const;

  /// After the kernel. Empty: every output is what it has to be, and nothing else has changed.
  std::string verdict();
  /// After a kernel that failed before it met the others. Empty: no output was touched, except where a rank may put its
  /// own piece without having met anybody.
  std::string untouched() const;

 private:
  /// A tensor of the host's, with its surroundings, and where that is on the device.
  struct Image {
    std::byte* host;
    std::byte* device;
    size_t bytes;
    std::byte* tensor() const { return device + kAround; }
    void bring() const;
    void fetch() const;
  };
  static constexpr size_t kAround = 64;  ///< that test::Tensor has on either side, at least
  struct Scene {
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
  std::vector<Scene> scenes_;
  std::vector<kernel::Job> jobs_;
  std::vector<kernel::Piece> table_;
};

/// What a rank's kernel said when it gave up; empty: it has not.
std::string verdict_of(const kernel::Control& control);

/// The ranks of a channel in one process and on one device.
class World : public Stage {
 public:
  /// How kernels of several ranks come to run at once.
  enum class How {
    kFused,    ///< in one cooperative launch
    kStreams,  ///< each on a stream of its own, an operation a launch
    kBatches,  ///< ... all of a rank's operations in one launch
    kThreads,  ///< ... launched by a thread a rank
  };
  World(const StageShape& shape, How how, size_t heap_bytes = size_t(128) << 20);
  ~World() override;

  std::string perform(const std::vector<Act>& acts) override;

  // What perform() consists of, for who does something in between.
  std::vector<Script> write(const std::vector<Act>& acts, uint64_t patience_ns = kPatienceNs);
  /// Those of the ranks [0, present); throws Error where a launch is refused.
  void launch(const std::vector<Script>& scripts, uint32_t present);
  /// Empty: all kernels have ended. What does not end is left alone from then on, with all its memory.
  std::string wait(std::chrono::milliseconds most);
  std::string verdict(std::vector<Script>& scripts);

  kernel::DeviceChannel channel(uint32_t rank) const;
  kernel::Control& control(uint32_t rank) const { return *reinterpret_cast<kernel::Control*>(controls_[rank]->data()); }
  const kernel::DeviceShape& shape() const { return shape_; }
  const Stream& stream(uint32_t rank) const { return *streams_[rank]; }
  Heap& heap() { return *heap_; }
  size_t pad_bytes() const { return pads_[0]->bytes(); }

  /// Several ranks' jobs where a fused launch finds them.
  const kernel::FusedRank* fuse(const std::vector<Script>& scripts, uint32_t present);

 private:
  kernel::DeviceShape shape_;
  How how_;
  std::vector<std::unique_ptr<Memory>> pads_, states_, controls_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::unique_ptr<Heap> heap_;
  bool hangs_ = false;
};

/// What tables call a reducing algorithm.
inline const char* short_name(kernel::DeviceAlgorithm algorithm) {
  if (algorithm == kernel::DeviceAlgorithm::kReducePackets) return "one_shot";
  return algorithm == kernel::DeviceAlgorithm::kReducePacketsTwoShot ? "two_shot" : "chunks";
}

/// Blocks of the largest kernel that the device runs at once. Loads all kernels. Throws Error.
uint32_t resident_blocks();

}  // namespace nvx::gpu
