#pragma once

#include <memory>

#include "torch/call/call.h"
#include "torch/core/agree_once.h"
#include "torch/device/kernel_path.h"
#include "torch/device/proxy_op.h"
#include "torch/streams/stream_order.h"

namespace nvx {

/// Runs collectives of a device's tensors over several hosts, in groups in which every host has kernels. Kernels do all
/// work on the devices, and the caller does not wait. If they reduce or gather inside each host, a rank copies only its
/// part to host memory and back.
class HostProxyPath {
 public:
  HostProxyPath(CallContext& context, std::shared_ptr<KernelPath> kernels)
      : context_(context), kernels_(std::move(kernels)) {}

  /// Whether this operation is proxied: kernels and host memory. Its collective, type and count must be set. May be a
  /// collective call: the first call for an operation that may be proxied opens the device on all ranks.
  bool agree_to_serve(const Operation& operation, at::Device device);
  /// The same for all operations that may be proxied. The first call is a collective call.
  bool agree_to_serve(at::Device device);

  /// Begins a call all of whose operations are proxied. The caller waits only for a stream that has yet to produce data
  /// that the operation uses. Later calls raise a failure that happens after this one returns.
  IntrusiveWork issue(Call&& call) EXCLUDES(mutex_);

  /// For a barrier: raises a failure of proxies, although they belong to another group. A synchronous barrier waits for
  /// them.
  void await_end(Mode mode, std::chrono::milliseconds most);
  /// Waits for the proxies in flight until `deadline`, as long as a kernel ends in each `grace`. Logs a failure that no
  /// call has raised.
  void drain(const Deadline& deadline, std::chrono::milliseconds grace);

 private:
  using Op = std::shared_ptr<ProxyOp>;
  Status begin(Call& call, const std::shared_ptr<Group>& group, StagingCopies& staging) REQUIRES(mutex_);
  Op prepare(TensorOperations&& collectives, const std::shared_ptr<Group>& group, StagingCopies& staging)
      REQUIRES(mutex_);
  /// Makes the proxy that runs an operation on the staging's stream. op: outlives it.
  std::unique_ptr<HostProxy> make(Group& group, ProxyOp& op, kernel::Collective collective,
                                  const StagingCopies& staging);
  Status launch(const Op& op, Group& group, StagingCopies& staging);
  Status leave_to_stream(const Op& op, const StagingCopies& staging);

  CallContext& context_;
  const std::shared_ptr<KernelPath> kernels_;
  const std::shared_ptr<TorchStreamOrder> order_ = std::make_shared<TorchStreamOrder>();
  AgreeOnce served_;
  Mutex mutex_;    // held from an operation's number to its place in the lane, because all ranks need one order
  Holder holder_;  // of `mutex_`
};

}  // namespace nvx
