// The parts of the backend that are not collectives: messages, windows, sparse tensors, splitting, hooks, the end.

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "torch/backend.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kGrace{300};

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag,
                                                         bool receives) {
  if (group_->failed()) raise(group_->failure());
  auto message = std::make_shared<Message>();
  message->peer = peer;
  message->tag = tag;
  message->dtype = dtype_of(tensor);
  message->data = static_cast<std::byte*>(tensor.data_ptr());
  message->bytes = size_t(tensor.numel()) * tensor.element_size();
  auto work = c10::make_intrusive<MessageWork>(group_, facts(kind), tensor, std::move(message));
  work->begin(receives);
  if (open_windows_.load(std::memory_order_acquire) != 0) into_window(work, receives ? Tensors{tensor} : Tensors{});
  return work;
}

namespace {

at::Tensor& message_tensor(const Arguments& args, std::vector<at::Tensor>& tensors, int tag) {
  if (tag < 0) args.invalid("Tag must be nonnegative, not " + std::to_string(tag));
  at::Tensor& tensor = args.single(tensors);
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) args.invalid("input tensor has to be contiguous");
  return tensor;
}

void check_peer(const Arguments& args, int peer, int size) {
  if (peer < 0 || peer >= size)
    args.invalid("invalid rank " + std::to_string(peer) + " in a group of " + std::to_string(size));
}

}  // namespace

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

void ProcessGroupNVX::startCoalescing() {
  std::lock_guard<std::mutex> lock(mutex_);
  // A window that an exception left open ends here: torch does not close it.
  const auto [window, fresh] = windows_.insert_or_assign(std::this_thread::get_id(), Window{});
  if (fresh) open_windows_.fetch_add(1, std::memory_order_release);
}

void ProcessGroupNVX::into_window(const IntrusiveWork& work, const Tensors& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto window = windows_.find(std::this_thread::get_id());
  if (window == windows_.end()) return;  // another thread's
  window->second.works.push_back(work);
  window->second.outputs.insert(window->second.outputs.end(), outputs.begin(), outputs.end());
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::endCoalescing() {
  Window window;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto open = windows_.find(std::this_thread::get_id());
    if (open == windows_.end()) return nullptr;
    window = std::move(open->second);
    windows_.erase(open);
    open_windows_.fetch_sub(1, std::memory_order_release);
  }
  if (window.works.empty()) return nullptr;
  if (window.works.size() == 1) return window.works.front();
  return c10::make_intrusive<WindowWork>(facts({c10d::OpType::COALESCED, nullptr}), std::move(window.works),
                                         std::move(window.outputs));
}

/// Ranks may hold different numbers of indices: sizes first, then indices and values of all, summed here in rank order.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::all_reduce_sparse(at::Tensor& tensor,
                                                                  const c10d::AllreduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allreduce");
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    args.invalid("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  const at::Tensor mine = tensor.coalesce();
  const auto gather = [&](const at::Tensor& in) {
    at::Tensor out = at::empty({size_ * in.numel()}, in.options());
    Collective c = args.all_gather_base(out, in);
    if (opts.timeout != c10d::kUnsetTimeout) c.operation.timeout = opts.timeout;
    const Status status = group_->execute(c.operation);
    if (!status.ok()) raise(status);
    return out;
  };
  const int64_t dims = mine.sparse_dim();
  std::vector<int64_t> described{mine._nnz(), dims, mine.dense_dim()};
  described.insert(described.end(), mine.sizes().begin(), mine.sizes().end());
  const at::Tensor facts_of_all = gather(at::tensor(described, at::kLong)).view({size_, int64_t(described.size())});
  int64_t most = 0;
  for (int64_t r = 0; r < size_; ++r) {
    most = std::max(most, facts_of_all[r][0].item<int64_t>());
    const at::Tensor shape = facts_of_all[r].slice(0, 1);
    if (!shape.equal(facts_of_all[0].slice(0, 1))) args.invalid("sparse tensors of all ranks must have the same shape");
  }
  const at::Tensor values = mine.values();
  at::Tensor padded_indices = at::zeros({most, dims}, mine.indices().options());
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = most;
  at::Tensor padded_values = at::zeros(shape, values.options());
  padded_indices.slice(0, 0, mine._nnz()).copy_(mine.indices().t());
  padded_values.slice(0, 0, mine._nnz()).copy_(values);
  const at::Tensor all_indices = gather(padded_indices).view({size_, most, dims});
  shape.insert(shape.begin(), size_);
  const at::Tensor all_values = gather(padded_values).view(shape);
  std::vector<at::Tensor> indices, parts;
  for (int64_t r = 0; r < size_; ++r) {
    const int64_t nnz = facts_of_all[r][0].item<int64_t>();
    indices.push_back(all_indices[r].slice(0, 0, nnz).t());
    parts.push_back(all_values[r].slice(0, 0, nnz));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(parts, 0), mine.sizes()).coalesce();
  tensor.copy_(sum);
  Tensors outputs{tensor};
  if (!opts.asyncOp && open_windows_ == 0) return nullptr;
  auto work = c10::make_intrusive<DoneWork>(facts({c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"}), outputs);
  if (open_windows_ != 0) into_window(work, outputs);
  return work;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  if (me == ranks.end()) return nullptr;
  const std::string name = opts ? opts->group_name : "";
  {
    // torch up to 2.13 splits once for each device type, with the same store and name.
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = children_.find(name);
    if (known != children_.end()) {
      if (auto child = known->second.lock()) return child;
    }
  }
  auto options = c10::make_intrusive<Options>(opts ? opts->timeout : options_->timeout);
  options->group_name = name;
  if (opts) {
    options->group_desc = opts->group_desc;
    options->global_ranks_in_group = opts->global_ranks_in_group;
  }
  auto child = c10::make_intrusive<ProcessGroupNVX>(store, int(me - ranks.begin()), int(ranks.size()), options);
  std::lock_guard<std::mutex> lock(mutex_);
  children_.insert_or_assign(name, c10::weak_intrusive_ptr<ProcessGroupNVX>(child));
  return child;
}

void ProcessGroupNVX::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  group_->set_timeout(timeout);
}

c10d::ErrorType ProcessGroupNVX::getError() {
  if (!group_->failed()) return c10d::ErrorType::SUCCESS;
  switch (group_->failure().code()) {
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerDied:
    case Code::kPeerLeft:
    case Code::kPeerFailed: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupNVX::abort() {
  run_abort_hooks();
  group_->abort("");
}

/// What the user never waited for gets a moment to end well, as its peers may wait for it. Then it ends.
void ProcessGroupNVX::shutdown() {
  const auto end = Clock::now() + kGrace;
  group_->lane().settle(kGrace);
  group_->mail().settle(std::max(std::chrono::milliseconds(0),
                                 std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now())));
  group_->leave();
}

void ProcessGroupNVX::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  TORCH_CHECK(onCompletionHook_ == nullptr, "ProcessGroupNVX OnCompletion hook already registered");
  onCompletionHook_ = std::move(hook);
  listeners_.fetch_add(1, std::memory_order_release);
}

void ProcessGroupNVX::tell(NvxWork& work) {
  if (onCompletionHook_) {
    const std::chrono::duration<float> active = work.ended() - work.began();
    onCompletionHook_(
        std::make_shared<c10d::WorkInfo>(work.type(), work.getSequencenumber(), work.began(), work.ended(), active));
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  if (work.exception()) return;
  std::vector<c10d::CompletionHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, hook] : completion_hooks_) hooks.push_back(hook);
  }
  c10d::CompletionHookArgs args;
  args.completionKey = work.getCompletionKey();
  if (timed_) args.duration_ms = std::chrono::duration<float, std::milli>(work.ended() - work.began()).count();
  for (const c10d::CompletionHook& hook : hooks) hook(args);
#endif
}

#ifdef C10D_BACKEND_HAS_HOOKS

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  Collectives all;
  all.push_back(arguments("ProcessGroupNVX::gather_single").gather_base(output, input, opts.rootRank));
  Tensors inputs{input}, outputs;
  if (opts.rootRank == rank_) outputs.push_back(output);
  return launch({c10d::OpType::GATHER, "nvx:gather"}, std::move(all), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

void ProcessGroupNVX::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_[id] = std::move(hook);
}

void ProcessGroupNVX::unregisterAbortHook(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  abort_hooks_.erase(id);
}

void ProcessGroupNVX::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (completion_hooks_.insert_or_assign(id, std::move(hook)).second)
    listeners_.fetch_add(1, std::memory_order_release);
}

void ProcessGroupNVX::unregisterCompletionHook(int64_t id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (completion_hooks_.erase(id)) listeners_.fetch_sub(1, std::memory_order_release);
}

#endif

void ProcessGroupNVX::run_abort_hooks() {
#ifdef C10D_BACKEND_HAS_HOOKS
  std::vector<c10d::AbortHook> hooks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, hook] : abort_hooks_) hooks.push_back(hook);
  }
  for (const c10d::AbortHook& hook : hooks) hook();
#endif
}

}  // namespace nvx
