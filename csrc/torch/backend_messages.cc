// c10d's sends and receives.

#include "torch/backend.h"
#include "torch/recorded.h"

namespace nvx {
namespace {

at::Tensor& message_tensor(const Arguments& args, std::vector<at::Tensor>& tensors, int tag) {
  if (tag < 0) args.invalid("Tag must be nonnegative, not " + std::to_string(tag));
  at::Tensor& tensor = args.single(tensors);
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    args.invalid("input tensor has to be contiguous, and its elements as they are: this has sizes " +
                 c10::str(tensor.sizes()) + " and strides " + c10::str(tensor.strides()) +
                 "; send a contiguous() copy of it, or receive into one");
  }
  return tensor;
}

void check_peer(const Arguments& args, int peer, int size) {
  if (peer < 0 || peer >= size)
    args.invalid("invalid rank " + std::to_string(peer) + " in a group of " + std::to_string(size));
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag,
                                                         bool receives) {
  if (!at::hasCallbacks()) [[likely]]
    return begin_transfer(kind, tensor, peer, tag, receives);
  const Tensors none, it{tensor};
  const auto [first, stride] = global_ranks();
  // It is recorded as asynchronous: torch does not say whether the caller of a message waits at once.
  NVX_RECORD_COMMS(true, std::make_tuple(static_cast<int64_t>(group_->sequence()), true),
                   std::make_tuple(group_->name(), pg_desc_), receives ? none : it, receives ? it : none, rank_,
                   kind.title + 4, receives ? 0 : tensor.numel(), receives ? tensor.numel() : 0, tensor.scalar_type(),
                   std::vector<int64_t>(), std::vector<int64_t>(), first, stride, size_);
  return begin_transfer(kind, tensor, peer, tag, receives);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::begin_transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag,
                                                               bool receives) {
  if (checked_group().failed()) raise(group_->check_alive());
  if (!tensor.is_cpu()) refuse_capture(tensor.device());
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->dtype = dtype_of(tensor);
  message->data = static_cast<std::byte*>(tensor.data_ptr());
  message->bytes = size_t(tensor.numel()) * tensor.element_size();
  return begin_message(kind, tensor, std::move(message), c10d::kUnsetTimeout, receives);
}

c10::intrusive_ptr<MessageWork> ProcessGroupNVX::begin_message(const Kind& kind, const at::Tensor& tensor,
                                                               std::shared_ptr<Message> message,
                                                               std::chrono::milliseconds timeout, bool receives) {
  kernels_->catch_up_if_behind();
  Term term = term_of(timeout);
  message->timeout = term.timeout;
  auto work = c10::make_intrusive<MessageWork>(group_, facts(kind), tensor, std::move(message), std::move(term.claim),
                                               pending_sends_);
  if (!tensor.is_cpu()) work->stage(comm_streams_, receives);
  work->count_in(pending_);
  work->begin(receives);
  into_coalescing_scope(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::send(Tensors& tensors, int peer, int tag) {
  const Arguments args = arguments("ProcessGroupNVX::send");
  check_peer(args, peer, size_);
  return transfer({c10d::OpType::SEND, "nvx:send"}, message_tensor(args, tensors, tag), peer, tag, /*receives=*/false);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::recv(Tensors& tensors, int peer, int tag) {
  const Arguments args = arguments("ProcessGroupNVX::recv");
  check_peer(args, peer, size_);
  return transfer({c10d::OpType::RECV, "nvx:recv"}, message_tensor(args, tensors, tag), peer, tag, /*receives=*/true);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::recvAnysource(Tensors& tensors, int tag) {
  const Arguments args = arguments("ProcessGroupNVX::recvAnysource");
  return transfer({c10d::OpType::RECVANYSOURCE, "nvx:recvAnySource"}, message_tensor(args, tensors, tag), kAnySource,
                  tag, /*receives=*/true);
}

}  // namespace nvx
