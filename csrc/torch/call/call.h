#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <iterator>
#include <memory>
#include <optional>
#include <span>

#include "group/timeout_extensions.h"
#include "torch/call/coalescing.h"
#include "torch/call/groups.h"
#include "torch/call/listeners.h"
#include "torch/call/work.h"
#include "torch/core/origin.h"
#include "torch/streams/output_hazards.h"
#include "torch/streams/staging_copies.h"

namespace nvx {

/// The properties of a call that torch needs.
struct Kind {
  c10d::OpType type;
  const char* title;  ///< "nvx:all_reduce"
  size_t lists = 0;   ///< number of lists, of one length each, in a future's value; 0: one list, not nested
  at::IntArrayRef in_splits = {};  ///< the splits that the caller passed, for the profiler
  at::IntArrayRef out_splits = {};
};

enum class Mode { kAsync, kSync };

/// One call, on its way to its route. `collectives`: one operation, or several on tensors of one device.
struct Call {
  const Kind& kind;
  std::span<TensorOperation> collectives;
  const Tensors& outputs;
  const Tensors& inputs;
  Mode mode;

  at::Device device() const { return device_of(collectives); }
  /// For a route that keeps them.
  TensorOperations take_collectives() const {
    return {std::make_move_iterator(collectives.begin()), std::make_move_iterator(collectives.end())};
  }
  Tensors used() const { return all_tensors(collectives, outputs, inputs); }
};

/// The state that all calls of one communicator share, whatever their route.
class CallContext {
 public:
  /// backend, listeners: must outlive this.
  CallContext(c10d::Backend& backend, Listeners& listeners, c10::intrusive_ptr<c10d::Store> store,
              std::shared_ptr<Group> group, const NvxOptions& options);

  Group& group() const { return *groups.of_cpu(); }
  /// Raises in a forked child.
  Group& checked_group() const {
    origin.check(rank);
    return group();
  }

  /// Whether a barrier waits for no device, in place of gloo: a program that names gloo may have work on its stream
  /// that needs a rank in the barrier. A group that has run collectives of device tensors waits for them as others do.
  bool barriers_on_host() const { return barrier_on_host && groups.all().size() == 1; }

  NvxWork::Facts facts(const Kind& kind) { return facts(kind, groups.of_cpu()); }
  /// group: its lane runs the call.
  NvxWork::Facts facts(const Kind& kind, const std::shared_ptr<Group>& group);
  struct Timeout {
    std::chrono::milliseconds value;  ///< 0: the group's
    TimeoutExtensions::Claim claim;   ///< keeps the timeout's extension until the operation has ended
  };
  /// given: the caller's; c10d::kUnsetTimeout: none given; see is_no_timeout().
  Timeout timeout_of(std::chrono::milliseconds given);
  void number(std::span<TensorOperation> collectives);
  /// Counts a collective of CPU tensors, called by the program. Warns, once a process, if a callback of a future makes
  /// it after other calls, so that ranks may differ in the order.
  void count_call(const Kind& kind);
  /// Whether even a synchronous call must return a work.
  bool needs_work() const;
  /// The streams and events of a call whose operations use a device's tensors in place. A synchronous call runs on the
  /// caller's stream, so that later work on this stream needs no wait.
  std::unique_ptr<StagingCopies> on_device(const Call& call);
  /// Whether the call accesses memory that pending results will be written to, or that a delegate still uses.
  bool has_hazard(const Call& call) { return hazards.awaited_in(call.inputs) || hazards.awaited_in(call.outputs); }

  /// Queues the work in a group's lane, which keeps it, and with it all tensors, until it has run.
  void enqueue(const c10::intrusive_ptr<LaneWork>& work, Lane& lane);
  /// The work of a synchronous call, which has ended. staging: null for CPU tensors.
  static IntrusiveWork done(NvxWork::Facts facts, const Tensors& outputs, std::unique_ptr<StagingCopies> staging);
  /// For an operation that has ended on this thread, or could not begin.
  void raise_if_failed(const Status& status);

  c10d::Backend& backend;
  const Origin origin;
  const int rank, size;
  const bool barrier_on_host;  ///< see NvxOptions
  Groups groups;
  Listeners& listeners;
  const std::shared_ptr<Muted> muted = std::make_shared<Muted>(false);
  CoalescingScopes scopes;
  OwnCommStreams streams;
  OutputHazards hazards;
  const std::shared_ptr<TimeoutExtensions> extensions = std::make_shared<TimeoutExtensions>();
  const NvxWork::SharedCounts counts = std::make_shared<NvxWork::Counts>();
};

}  // namespace nvx
