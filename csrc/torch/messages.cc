#include "torch/messages.h"

#include "torch/arguments/checks.h"
#include "torch/core/argument_error.h"
#include "torch/core/recorded.h"
#include "torch/core/tool_range.h"
#include "torch/device/delegate.h"
#include "torch/device/kernel_path.h"

namespace nvx {
namespace {

at::Tensor& message_tensor(const Checks& args, Tensors& tensors, int tag) {
  if (tag < 0) args.invalid("Tag must be nonnegative, not ", tag);
  at::Tensor& tensor = args.single(tensors);
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    args.invalid("the tensor has to be contiguous, without the conj or neg bit: this has sizes ", tensor.sizes(),
                 " and strides ", tensor.strides(), "; send a contiguous() copy of it, or receive into one");
  }
  return tensor;
}

/// Stands for a message that has not begun: the scope's work stands for it later.
class BatchedWork final : public c10d::Work {
 public:
  using Work::Work;
  bool isCompleted() override { return false; }
  bool wait(std::chrono::milliseconds) override {
    throw_argument_error(
        "nvx: this message is part of a batch that NVX_DELEGATE gives to NCCL, and begins when the batch is complete. "
        "Next: wait for the works that batch_isend_irecv returns");
  }
};

}  // namespace

IntrusiveWork Messages::send(Tensors& tensors, int peer, int tag) {
  return transfer("send", {c10d::OpType::SEND, "nvx:send"}, tensors, peer, tag, /*receives=*/false);
}

IntrusiveWork Messages::receive(Tensors& tensors, int peer, int tag) {
  return transfer("recv", {c10d::OpType::RECV, "nvx:recv"}, tensors, peer, tag, /*receives=*/true);
}

IntrusiveWork Messages::receive_any(Tensors& tensors, int tag) {
  return transfer("recv", {c10d::OpType::RECVANYSOURCE, "nvx:recvAnySource"}, tensors, kAnySource, tag,
                  /*receives=*/true);
}

IntrusiveWork Messages::transfer(const char* called, const Kind& kind, Tensors& tensors, int peer, int tag,
                                 bool receives) {
  const Checks args(called, context_.group());
  if (kind.type != c10d::OpType::RECVANYSOURCE && (peer < 0 || peer >= context_.size))
    args.invalid("invalid rank ", peer, " in a group of ", context_.size);
  at::Tensor& tensor = message_tensor(args, tensors, tag);
  const ToolRange range(kind.title + 4, [&] { return tensor.nbytes(); });
  if (!at::hasCallbacks()) [[likely]]
    return begin_transfer(kind, tensor, peer, tag, receives);
  const Tensors none, it{tensor};
  const auto [first, stride] = context_.groups.global_ranks();
  // It is recorded as asynchronous: torch does not pass on whether the caller waits for a message at once.
  NVX_RECORD_COMMS(true, std::make_tuple(static_cast<int64_t>(context_.group().sequence()), true),
                   std::make_tuple(context_.group().name(), context_.backend.getGroupDesc()), receives ? none : it,
                   receives ? it : none, context_.rank, kind.title + 4, receives ? 0 : tensor.numel(),
                   receives ? tensor.numel() : 0, tensor.scalar_type(), std::vector<int64_t>(), std::vector<int64_t>(),
                   first, stride, context_.size);
  const CallRecord record(kind.title, it);
  return begin_transfer(kind, tensor, peer, tag, receives);
}

IntrusiveWork Messages::begin_transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag, bool receives) {
  if (context_.checked_group().failed()) raise(context_.group().check_alive(kind.title + 4));
  if (!tensor.is_cpu()) refuse_capture(tensor.device());
  if (is_delegated(tensor, peer)) return begin_delegated(kind, tensor, peer, tag, receives);
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->dtype = dtype_of(tensor);
  message->data = static_cast<std::byte*>(tensor.data_ptr());
  message->bytes = tensor.nbytes();
  message->timed_from_wait = tensor.is_cpu();  // as gloo's; the program need not wait for one of a device
  if (tensor.device().type() == kernel_device()) {
    message->at = context_.group().mailbox().reach(message->data, message->bytes, tensor.device().index(), peer);
    if (message->at) context_.group().device().update_pools();
  }
  return begin(kind, tensor, std::move(message), c10d::kUnsetTimeout, receives);
}

c10::intrusive_ptr<MessageWork> Messages::begin(const Kind& kind, const at::Tensor& tensor,
                                                std::shared_ptr<Message> message, std::chrono::milliseconds timeout,
                                                bool receives) {
  kernels_.flush_if_postponed();
  CallContext::Timeout limit = context_.timeout_of(timeout);
  message->timeout = limit.value;
  auto work = c10::make_intrusive<MessageWork>(context_.facts(kind), tensor, std::move(message), std::move(limit.claim),
                                               pending_sends_);
  if (!tensor.is_cpu()) work->stage(context_.streams, receives);
  work->count_in(context_.counts);
  work->begin(receives);
  context_.scopes.add(work);
  return work;
}

bool Messages::is_delegated(const at::Tensor& tensor, int peer) {
  return delegate_ && !tensor.is_cpu() && peer != context_.rank &&
         delegate_->agree_to_serve(tensor.device(), tensor.nbytes());
}

IntrusiveWork Messages::begin_delegated(const Kind& kind, const at::Tensor& tensor, int peer, int tag, bool receives) {
  if (peer == kAnySource) {
    throw_argument_error(
        "nvx: NCCL has no receive from any source, and NVX_DELEGATE gives messages of this size to NCCL. Next: name "
        "the sender, or raise the size of send_recv in NVX_DELEGATE");
  }
  const DelegatedMessage message{tensor, peer, tag, receives,
                                 context_.group().span_of(context_.timeout_of(c10d::kUnsetTimeout).value)};
  if (context_.scopes.add(message)) return c10::make_intrusive<BatchedWork>(context_.rank, kind.type);
  return kernels_.begin_delegated(context_, {message}, *delegate_, *pending_sends_);
}

c10::intrusive_ptr<NvxWork> Messages::begin_delegated(const CoalescingScope& scope) {
  if (scope.delegated.empty()) return {};
  return kernels_.begin_delegated(context_, scope.delegated, *delegate_, *pending_sends_);
}

void Messages::settle(const Deadline& deadline) {
  pending_sends_->flush(nullptr, deadline);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now());
  context_.group().mailbox().settle(std::max(std::chrono::milliseconds(0), left));
}

}  // namespace nvx
