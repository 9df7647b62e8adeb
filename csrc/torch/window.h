#pragma once

#include "torch/backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include "group/p2p/window.h"

namespace nvx {

/// The window that dist._new_window returns: CPU tensors, one per rank, that the other ranks write to. A tensor is kept
/// from tensor_register() to tensor_deregister(), or to the end of the group, whatever `owning` is: peers write to it
/// without a check that this object still exists.
class TensorWindow final : public c10d::Window {
 public:
  TensorWindow(c10::intrusive_ptr<c10d::Backend> backend, std::weak_ptr<Communicator> communicator)
      : backend_(backend), communicator_(std::move(communicator)) {}

  void tensor_register(const at::Tensor& tensor, bool owning) override;
  void tensor_deregister() override;
  IntrusiveWork put(const at::Tensor& tensor, int64_t rank, int64_t offset, bool async,
                    const c10d::PutOptions& opts) override;
  IntrusiveWork signal(int64_t rank, bool async, const c10d::SignalOptions& opts) override;
  IntrusiveWork wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions& opts) override;
  /// Returns the tensor itself for this rank. Other ranks' tensors are not mapped.
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  /// The registered tensor and its window.
  struct Registered {
    std::shared_ptr<nvx::Window> window;
    at::Tensor tensor;
  };

  std::shared_ptr<Communicator> communicator() const;
  Registered registered(const char* called) const EXCLUDES(mutex_);
  IntrusiveWork begin(Communicator& communicator, const char* title, const at::Tensor& tensor,
                      std::shared_ptr<Message> message, std::chrono::milliseconds timeout, bool receives, bool async);

  const c10::weak_intrusive_ptr<c10d::Backend> backend_;
  const std::weak_ptr<Communicator> communicator_;
  mutable Mutex mutex_;  // never held during a wait
  Registered registered_ GUARDED_BY(mutex_);
};

}  // namespace nvx

#endif
