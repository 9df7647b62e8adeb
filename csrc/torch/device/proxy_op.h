#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "torch/call/work.h"

namespace nvx {

/// The host's part of proxied collectives, which lets their kernels proceed, and the data that both parts use.
class ProxyOp : public std::enable_shared_from_this<ProxyOp> {
 public:
  ProxyOp(const std::shared_ptr<Group>& group, TensorOperations operations)
      : collectives(std::move(operations)), group_(group) {}

  /// From now on it keeps its group, until it has ended, and counts as pending there. An operation that a graph holds
  /// does not keep its group. on_failure: called with the code if the group has failed; may be empty.
  void expect(NvxWork::SharedCounts counts, std::function<void(Code)> on_failure) {
    expected_ = std::make_unique<Expected>(group_.lock(), std::move(counts), std::move(on_failure));
  }
  /// Queues it in the group's lane, unless it is already queued or left to the stream.
  void queue_once();
  /// The same, for a thread of the pool, before all of the call has begun. Returns false if the pool has no thread.
  bool queue_early();
  void leave_to_stream() { queued_ = true; }
  /// The same on a thread of the device's runtime, which must not call the device. So it neither runs the operation nor
  /// drops the last reference to anything: the reference moves with the call.
  static void queue_from_stream(std::shared_ptr<ProxyOp> call);

  TensorOperations collectives;  ///< their addresses do not change

 private:
  class Turn;
  /// State of one pending operation: keeps the group and the count until the last turn has ended.
  struct Expected {
    Expected(std::shared_ptr<Group> kept, NvxWork::SharedCounts shared, std::function<void(Code)> hook)
        : group(std::move(kept)), counts(std::move(shared)), on_failure(std::move(hook)) {
      counts->pending.fetch_add(1, std::memory_order_relaxed);
    }
    ~Expected() { counts->pending.fetch_sub(1, std::memory_order_release); }
    const std::shared_ptr<Group> group;
    const NvxWork::SharedCounts counts;
    const std::function<void(Code)> on_failure;
  };

  const std::weak_ptr<Group> group_;
  std::unique_ptr<Expected> expected_;
  bool queued_ = false;  // used only by the thread that begins it
};

}  // namespace nvx
