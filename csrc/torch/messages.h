#pragma once

#include <memory>

#include "torch/call/call.h"
#include "torch/streams/pending_sends.h"

namespace nvx {

class Delegate;
class KernelPath;

class Messages {
 public:
  /// delegate: may be null.
  Messages(CallContext& context, KernelPath& kernels, Delegate* delegate)
      : context_(context),
        kernels_(kernels),
        delegate_(delegate),
        pending_sends_(PendingSends::of(context.groups.of_cpu())) {}

  /// For the only tensor in the list.
  IntrusiveWork send(Tensors& tensors, int peer, int tag);
  IntrusiveWork receive(Tensors& tensors, int peer, int tag);
  IntrusiveWork receive_any(Tensors& tensors, int tag);
  /// Begins a message whose peer, tag and memory are set. The tensor is kept until the end.
  c10::intrusive_ptr<MessageWork> begin(const Kind& kind, const at::Tensor& tensor, std::shared_ptr<Message> message,
                                        std::chrono::milliseconds timeout, bool receives);
  /// Begins the delegated messages of a scope, as one batch. Returns its work, or null if there are none.
  c10::intrusive_ptr<NvxWork> begin_delegated(const CoalescingScope& scope);
  /// Passes messages whose data arrives from a device before the deadline to the mailbox, and waits for them.
  void settle(const Deadline& deadline);

 private:
  /// called: "send".
  IntrusiveWork transfer(const char* called, const Kind& kind, Tensors& tensors, int peer, int tag, bool receives);
  IntrusiveWork begin_transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag, bool receives);
  /// Whether a delegate moves the message. May be a collective call, as for a collective.
  bool is_delegated(const at::Tensor& tensor, int peer);
  IntrusiveWork begin_delegated(const Kind& kind, const at::Tensor& tensor, int peer, int tag, bool receives);

  CallContext& context_;
  KernelPath& kernels_;
  Delegate* const delegate_;
  const std::shared_ptr<PendingSends> pending_sends_;
};

}  // namespace nvx
