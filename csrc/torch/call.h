#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>
#include <optional>

#include "group/extensions.h"
#include "torch/coalescing.h"
#include "torch/core/origin.h"
#include "torch/device/output_hazards.h"
#include "torch/device/staging_copies.h"
#include "torch/groups.h"
#include "torch/listeners.h"
#include "torch/work.h"

namespace nvx {

class KernelPath;

using Tensors = std::vector<at::Tensor>;
using IntrusiveWork = c10::intrusive_ptr<c10d::Work>;

/// As what torch knows a call.
struct Kind {
  c10d::OpType type;
  const char* title;          ///< "nvx:all_reduce"
  size_t lists = 0;           ///< in how many lists of one length a future has the outputs; 0: in one, as they are
  at::IntArrayRef give = {};  ///< the splits that the caller named, for the profiler
  at::IntArrayRef take = {};
};

enum class Mode { kAsync, kSync };

/// What a call that is one operation asks for.
inline TensorOperations one(TensorOperation&& operation) {
  TensorOperations all;
  all.push_back(std::move(operation));
  return all;
}

/// One call, on its way to its route. `collectives` are what it asks for: one operation, or several on tensors of one
/// device.
struct Call {
  const Kind& kind;
  TensorOperations& collectives;  ///< the route takes them where it keeps them
  const Tensors& outputs;
  const Tensors& inputs;
  Mode mode;

  at::Device device() const { return device_of(collectives); }
  Tensors used() const { return all_tensors(collectives, outputs, inputs); }
  /// What a work that begins on a device is recorded with, where anybody records. A synchronous call is a record
  /// itself.
  std::optional<Tensors> recorded() const;
};

/// What all calls of one backend share, whatever their route.
class CallContext {
 public:
  /// backend: outlives this.
  CallContext(c10d::Backend& backend, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
              const NvxOptions& options);

  Group& group() const { return *group_; }
  /// Raises in a forked child.
  Group& checked_group() const {
    origin.check(rank);
    return group();
  }

  NvxWork::Facts facts(const Kind& kind) { return facts(kind, group_); }
  /// group: whose lane carries it out.
  NvxWork::Facts facts(const Kind& kind, const std::shared_ptr<Group>& group);
  struct Term {
    std::chrono::milliseconds timeout;  ///< 0: the group's
    Extensions::Claim claim;            ///< what the operation keeps until it has ended
  };
  /// given: the timeout that an operation was called with, if any.
  Term term_of(std::chrono::milliseconds given);
  void number(TensorOperations& collectives);
  /// Whether a synchronous call, too, must return a work.
  bool needs_work() const;
  /// The streams and events of a call whose operations use a device's tensors where they are. A synchronous one runs on
  /// the caller's stream, so that nothing that this stream is given later need wait for it.
  std::unique_ptr<StagingCopies> on_device(const Call& call);
  /// Whether the call reads or writes memory that pending results will be written to, or that a delegate still uses.
  bool comes_behind(const Call& call) { return hazards.awaited_in(call.inputs) || hazards.awaited_in(call.outputs); }
  /// Has the stream wait for results that will be written to memory of the call's tensors. The host waits until the
  /// stream can: those that the lane has yet to bring have no stream yet.
  void follow_hazards(const Call& call, const c10::Stream& stream);

  /// Puts it into a group's lane, which keeps the work, and with it all tensors, until it has run.
  void enqueue(const c10::intrusive_ptr<LaneWork>& work, Lane& lane);
  /// The work of a synchronous call, which has ended. staging: null where its tensors are the CPU's.
  static IntrusiveWork done(NvxWork::Facts facts, const Tensors& outputs, std::unique_ptr<StagingCopies> staging);
  /// Of an operation that has ended on this thread, or that could not be begun.
  void raise_if_failed(const Status& status);

  c10d::Backend& backend;
  const Origin origin;
  const int rank, size;
  Groups groups;
  Listeners listeners;
  CoalescingScopes scopes;
  OwnCommStreams streams;
  OutputHazards hazards;
  const std::shared_ptr<Extensions> extensions = std::make_shared<Extensions>();
  const NvxWork::Pending pending = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<bool> timed{false};
  const std::shared_ptr<KernelPath> kernels;

 private:
  void follow_hazards(const Tensors& tensors, const c10::Stream& stream);

  const std::shared_ptr<Group> group_;
};

}  // namespace nvx
