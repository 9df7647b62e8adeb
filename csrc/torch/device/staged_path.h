#pragma once

#include "torch/call/call.h"

namespace nvx {

/// Runs collectives of a device's tensors through host memory: as a whole, or chunk by chunk.
class StagedPath {
 public:
  explicit StagedPath(CallContext& context) : context_(context) {}

  /// As a whole. A synchronous call uses the caller's stream, unless it must be ordered after pending results.
  IntrusiveWork issue(Call&& call);
  /// Always on the group's own streams, even for a synchronous call, because several streams are in use at once.
  IntrusiveWork issue_in_chunks(Call&& call);

 private:
  IntrusiveWork enqueue(Call&& call);
  IntrusiveWork enqueue_and_wait(Call&& call);
  Status execute(std::span<TensorOperation> collectives, StagingCopies& staging);

  CallContext& context_;
};

}  // namespace nvx
