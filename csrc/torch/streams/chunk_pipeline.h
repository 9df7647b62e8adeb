#pragma once

#include <array>
#include <memory>

#include "group/group.h"
#include "group/plan/chunks.h"
#include "torch/streams/staging_copies.h"

namespace nvx {

/// Runs one large collective of a device's tensors in chunks, through a few slots of host memory. While the group
/// processes one chunk, the next ones are copied to the host and the previous one is copied back. The operation points
/// to device memory, which must stay allocated until run() has returned and the stream has passed the operation.
class ChunkPipeline {
 public:
  /// Begins to copy the first chunks, after all work already enqueued on the stream to the host.
  ChunkPipeline(const Operation& operation, int rank, const PlanFacts& facts, const CommStreams& streams);
  /// Runs all chunks on this thread, which holds the group's lane. The first failure ends the run, and no later chunk
  /// is copied back.
  Status run(Group& group, const Operation& operation, Runner runner);

 private:
  static constexpr size_t kSlots = 3;  ///< one chunk is copied to the host, one is in the group, one is copied back

  /// A chunk, in host memory.
  struct Slot {
    explicit Slot(const CommStreams& streams) : staging(streams) {}
    StagingCopies staging;
    Operation part;
    Loads d2h, h2d;
  };
  void copy_in_next(const Operation& operation);

  const at::Device device_;
  const int rank_;
  const Cut cut_;
  Whole whole_;
  at::Tensor memory_;  // of all slots
  std::array<std::unique_ptr<Slot>, kSlots> slots_;
  size_t copied_in_ = 0;
};

}  // namespace nvx
