#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "torch/work.h"

namespace nvx {

/// The host's part of proxied collectives, which lets their kernels go on, and all that both parts use.
class ProxyOp : public std::enable_shared_from_this<ProxyOp> {
 public:
  ProxyOp(const std::shared_ptr<Group>& group, TensorOperations operations)
      : collectives(std::move(operations)), group_(group) {}

  /// From now on it keeps its group, which it does not where graphs hold it, and counts there until it has ended.
  /// on_failure: told what the group has failed by, if it has; may be empty.
  void expect(NvxWork::Pending pending, std::function<void(Code)> on_failure);
  /// Gives it to the group's lane.
  void queue();
  /// The same, if that has not been done, or left to the stream.
  void queue_once() {
    if (!std::exchange(queued_, true)) queue();
  }
  /// The same before all of it has been begun, for a thread of the pool. False if there is none.
  bool queue_early();
  void leave_to_stream() { queued_ = true; }
  /// The same on a thread of the device's, where nothing may be asked of the device, and so nothing carried out, nor
  /// the last of anything let go: the reference goes with the call.
  static void queue_from_stream(std::shared_ptr<ProxyOp> call);

  TensorOperations collectives;  ///< stay where they are

 private:
  class Turn;
  /// What is given up once: the group is kept, and the call counted, until the last turn has ended.
  struct Expected {
    Expected(std::shared_ptr<Group> kept, NvxWork::Pending counts, std::function<void(Code)> told);
    ~Expected();
    const std::shared_ptr<Group> group;
    const NvxWork::Pending pending;
    const std::function<void(Code)> on_failure;
  };

  const std::weak_ptr<Group> group_;
  std::unique_ptr<Expected> expected_;
  bool queued_ = false;  // of the thread that begins it
};

}  // namespace nvx
