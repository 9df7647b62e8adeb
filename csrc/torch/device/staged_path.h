#pragma once

#include "torch/call.h"

namespace nvx {

/// Carries out collectives of a device's tensors through host memory: as a whole, or chunk by chunk.
class StagedPath {
 public:
  explicit StagedPath(CallContext& context) : context_(context) {}

  /// As a whole. A synchronous one uses the caller's own stream, unless it must come behind results that are on their
  /// way.
  IntrusiveWork issue(Call&& call);
  /// On the group's own streams whether synchronous or not, as several of them are in use at once.
  IntrusiveWork issue_in_chunks(Call&& call);

 private:
  IntrusiveWork enqueue(Call&& call);
  IntrusiveWork enqueue_and_wait(Call&& call);
  Status execute(TensorOperations& collectives, StagingCopies& staging);

  CallContext& context_;
};

}  // namespace nvx
