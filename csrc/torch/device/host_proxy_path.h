#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "torch/call.h"
#include "torch/core/ask_once.h"
#include "torch/device/proxy_op.h"
#include "torch/device/stream_order.h"

namespace nvx {

/// Carries out collectives of a device's tensors over several hosts, in groups in which every host has kernels: these
/// do all that is done on devices, and the caller waits for nothing. Where they sum, or hand out, inside each host, a
/// rank brings only its part to host memory, and takes only that back.
class HostProxyPath {
 public:
  explicit HostProxyPath(CallContext& context) : context_(context) {}

  /// Whether this operation, of which collective, type and count are known, goes by kernels and host memory. May be a
  /// step of all ranks: the first call for an operation that may go so opens the device on all of them.
  bool agree_to_serve(const Operation& operation, at::Device device);
  /// The same of all operations that may go so. The first call is a step of all ranks.
  bool agree_to_serve(at::Device device);

  /// Begins a call all of whose operations go so. The caller waits for nothing but for a stream to bring what the
  /// operation is to use. A failure that comes later is raised by what is called later.
  IntrusiveWork issue(Call&& call) EXCLUDES(mutex_);

  /// For a barrier: raises a failure of proxies, although they are of another group. A synchronous barrier waits for
  /// them.
  void see_end(Mode mode, std::chrono::milliseconds most);
  /// Waits until all that was begun has ended, and logs a failure of it that has not been raised.
  void see_off(const Deadline& deadline);

 private:
  using Op = std::shared_ptr<ProxyOp>;
  Status begin(Call& call, const std::shared_ptr<Group>& group, StagingCopies& staging) REQUIRES(mutex_);
  Op prepare(TensorOperations&& collectives, const std::shared_ptr<Group>& group, StagingCopies& staging)
      REQUIRES(mutex_);
  /// What carries an operation out, on the staging's stream. op: outlives it.
  std::unique_ptr<HostProxy> make(Group& group, ProxyOp& op, kernel::Collective collective,
                                  const StagingCopies& staging);
  Status launch(const Op& op, Group& group, StagingCopies& staging);
  Status leave_to_stream(const Op& op, const StagingCopies& staging);
  Status call_host(const StagingCopies& staging, void (*what)(void*), void* with);

  CallContext& context_;
  const std::shared_ptr<TorchStreamOrder> order_ = std::make_shared<TorchStreamOrder>();
  AskOnce served_;
  Mutex mutex_;  // held from an operation's number to its place in the lane, as all ranks have one order
  std::atomic<std::thread::id> holder_{};  // the thread that has it: a signal handler may run there
};

}  // namespace nvx
