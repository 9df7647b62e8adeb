#pragma once

#include <optional>

#include "gpu/hub.h"
#include "gpu/rank_program.h"
#include "memory/gpu/peer_mappings.h"

namespace nvx::gpu {

/// Durations of the set-up steps in ms. The device's context exists and the kernels are loaded before the first step.
struct StartTimes {
  double share = 0;    ///< agreement, arena, exchange of descriptors, trial of every pair
  double channel = 0;  ///< the pad and what belongs to it
};

struct Place {
  int device = 0;
  std::optional<ShareKind> kind{};  ///< of the memory that the ranks share; none: the best there is
};

/// One rank in its own process: its end of a channel in memory that the ranks share through PeerMappings.
class Rank {
 public:
  /// A collective call of all ranks. Throws Error.
  Rank(Member& member, const ChannelShape& shape, const Place& place, StartTimes* times);
  ~Rank();

  /// This rank's side of operations, on the device.
  RankProgram write(const std::vector<Case>& cases, uint64_t timeout_ns);
  /// Launches the operations, `at_once` of them in each launch.
  void launch(const RankProgram& program, size_t at_once);
  void launch(std::span<const kernel::Job> jobs);
  /// Empty: the operations have ended, with a result or a verdict.
  std::string wait(std::chrono::milliseconds most);

  kernel::Control& control() { return *reinterpret_cast<kernel::Control*>(control_->data()); }
  const kernel::DeviceShape& shape() const { return shape_; }
  const Stream& stream() const { return *stream_; }
  PeerMappings& mappings() { return *mappings_; }
  size_t pad_bytes() const { return kernel::DevicePad{shape_}.bytes(); }

 private:
  void format(const ChannelShape& shape, Member& member);

  kernel::DeviceShape shape_;
  uint32_t rank_;
  std::unique_ptr<PeerMappings> mappings_;
  Span span_;
  std::unique_ptr<Memory> state_, control_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Heap> heap_;
  bool hangs_ = false;
};

}  // namespace nvx::gpu
