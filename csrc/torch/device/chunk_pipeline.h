#pragma once

#include <array>
#include <memory>

#include "group/group.h"
#include "group/plan/chunks.h"
#include "torch/device/staging_copies.h"

namespace nvx {

/// Carries out one large collective of a device's tensors, in chunks that follow each other through a few slots of host
/// memory: while the group is at one chunk, the next ones come down and the last one goes back up. The operation names
/// the device's memory, which must stay until run() has returned and its stream has come past.
class ChunkPipeline {
 public:
  /// The first chunks set out, behind what the stream to the host has been given so far.
  ChunkPipeline(const Operation& operation, int rank, const PlanFacts& facts, const CommStreams& streams);
  /// Runs all chunks on this thread, which holds the group's lane. The first failure ends it, and no later chunk is
  /// written back.
  Status run(Group& group, const Operation& operation, Carrier carrier);

 private:
  static constexpr size_t kSlots = 3;  ///< one chunk comes down, the group is at one, one goes back up

  /// A chunk, in host memory.
  struct Slot {
    explicit Slot(const CommStreams& streams) : staging(streams) {}
    StagingCopies staging;
    Operation part;
    Loads down, up;
  };
  void bring_next(const Operation& operation);

  const at::Device device_;
  const int rank_;
  const Cut cut_;
  Whole whole_;
  at::Tensor memory_;  // that of all slots
  std::array<std::unique_ptr<Slot>, kSlots> slots_;
  size_t brought_ = 0;
};

}  // namespace nvx
