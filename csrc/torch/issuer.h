#pragma once

#include <memory>
#include <string>

#include "torch/arguments/arguments.h"
#include "torch/call/call.h"
#include "torch/device/delegate.h"
#include "torch/device/host_proxy_path.h"
#include "torch/device/staged_path.h"

namespace nvx {

enum class Operations { kOne, kSeveral };

struct CallOptions {
  std::chrono::milliseconds timeout;
  Mode mode;
};

/// Begins the collectives of one communicator by their routes: `group/plan/route.h` chooses, by facts of the Arguments.
class Issuer {
 public:
  explicit Issuer(CallContext& context);

  /// name: see Checks. Of a call with several operations none is delegated, so that all begin in the same way.
  Arguments arguments(const char* name, Operations operations = Operations::kOne);

  /// Begins every collective, and may move from them. Returns null if a synchronous call has ended and no work is
  /// needed.
  IntrusiveWork dispatch(const Kind& kind, std::span<TensorOperation> collectives, Tensors& outputs, Tensors& inputs,
                         const CallOptions& options);

  KernelPath& kernels() { return *kernels_; }
  /// Null if NVX_DELEGATE is empty.
  Delegate* delegate() { return delegate_.get(); }

  IntrusiveWork barrier(const c10d::BarrierOptions& opts, Mode mode);

  /// A collective call: opens the device, as the first collective would.
  void connect(at::Device device);
  /// abort() aborts the delegate's collectives, from any thread; finalize() first gives them time to end.
  void abort() {
    if (delegate_) delegate_->abort();
  }
  void finalize() {
    if (delegate_) delegate_->finalize();
  }
  void drain(const Deadline& deadline, std::chrono::milliseconds grace) { proxies_.drain(deadline, grace); }

 private:
  IntrusiveWork issue(Call&& call);
  IntrusiveWork issue_in_memory(Call&& call);
  IntrusiveWork issue_recorded(Call&& call);
  std::string profiled_as(TensorOperation& c);
  /// Null if there is a delegate.
  HostProxyPath* proxies() { return delegate_ ? nullptr : &proxies_; }

  CallContext& context_;
  const std::shared_ptr<KernelPath> kernels_;
  StagedPath staged_{context_};
  HostProxyPath proxies_{context_, kernels_};  // for the group of devices' tensors
  std::shared_ptr<Delegate> delegate_;         // null if NVX_DELEGATE is empty
};

}  // namespace nvx
