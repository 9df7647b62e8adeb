#pragma once

#include <memory>

#include "torch/call/call.h"
#include "torch/streams/pending_sends.h"

namespace nvx {

class KernelPath;

/// Begins the sends and receives of one backend.
class Messages {
 public:
  Messages(CallContext& context, KernelPath& kernels)
      : context_(context), kernels_(kernels), pending_sends_(PendingSends::of(context.groups.of_cpu())) {}

  /// For the only tensor in the list.
  IntrusiveWork send(Tensors& tensors, int peer, int tag);
  IntrusiveWork receive(Tensors& tensors, int peer, int tag);
  IntrusiveWork receive_any(Tensors& tensors, int tag);
  /// Begins a message whose peer, tag and memory are set. The tensor is kept until the end.
  c10::intrusive_ptr<MessageWork> begin(const Kind& kind, const at::Tensor& tensor, std::shared_ptr<Message> message,
                                        std::chrono::milliseconds timeout, bool receives);
  /// Gives messages that wait for a device's data to the mail, if the data arrives before the deadline, and waits for
  /// the mail.
  void settle(const Deadline& deadline);

 private:
  /// called: "ProcessGroupNVX::send".
  IntrusiveWork transfer(const char* called, const Kind& kind, Tensors& tensors, int peer, int tag, bool receives);
  IntrusiveWork begin_transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag, bool receives);

  CallContext& context_;
  KernelPath& kernels_;
  const std::shared_ptr<PendingSends> pending_sends_;
};

}  // namespace nvx
