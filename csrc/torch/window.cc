// The windows of torch.distributed.
#include "torch/backend.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include "group/p2p/window.h"
#include "torch/arguments/checks.h"
#include "torch/core/recorded.h"

namespace nvx {
namespace {

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

template <class... Parts>
[[noreturn]] void refuse_call(const char* called, const Parts&... why) {
  throw_argument_error("nvx: ", called, ": ", in_python(why)...);
}

/// Why peers cannot write to this tensor, or it cannot be written to theirs; empty if they can.
std::string why_unfit(const at::Tensor& tensor) {
  if (!tensor.defined()) return "the tensor is undefined";
  if (!tensor.is_cpu()) return "windows support CPU tensors only; the tensor is on " + tensor.device().str();
  if (tensor.layout() != at::kStrided) return "the tensor must be dense; its layout is " + in_python(tensor.layout());
  if (!tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg())
    return c10::str("the tensor must be contiguous and must not have the conj or neg bit; its sizes are ",
                    tensor.sizes(), ", its strides ", tensor.strides());
  return why_no_memory(tensor);
}

int peer_of(const char* called, int64_t rank, int size) {
  if (rank < 0 || rank >= size) refuse_call(called, "invalid rank ", rank, " in a group of ", size);
  return int(rank);
}

/// Raises a bad argument as an argument error of Python. why: a better text, if not empty.
template <class Begin>
auto as_argument(const char* called, Begin begin, const std::string& why = "") {
  try {
    return begin();
  } catch (const Error& error) {
    if (error.code() == Code::kInvalid) refuse_call(called, why.empty() ? error.reason() : why);
    raise(error.status());
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Window> ProcessGroupNVX::new_window(const std::optional<at::Tensor>& tensor) {
  const auto current = active();
  if (const Status alive = current->group().check_alive(); !alive.ok()) raise(alive);
  auto window = c10::make_intrusive<TensorWindow>(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this),
                                                  current->weak_from_this());
  if (tensor) window->tensor_register(*tensor, /*owning=*/true);
  return window;
}

/// Raises unless the group can be used: a window may outlive its group.
std::shared_ptr<Communicator> TensorWindow::communicator() const {
  const auto backend = backend_.lock();
  const auto there = communicator_.lock();
  if (!backend || !there) throw_argument_error("nvx: the group of this window has been destroyed");
  if (const Status alive = there->context.checked_group().check_alive(); !alive.ok()) raise(alive);
  return {there.get(), [backend, there](Communicator*) {}};  // keeps both
}

TensorWindow::Registered TensorWindow::registered(const char* called) const {
  MutexLock lock(mutex_);
  if (!registered_.window) refuse_call(called, "no tensor is registered with this window. Next: tensor_register first");
  return registered_;
}

/// A rejected tensor is reported to all ranks, because they wait for this one here.
void TensorWindow::tensor_register(const at::Tensor& tensor, bool /*owning*/) {
  const auto current = communicator();
  std::string why;
  std::byte* data = nullptr;
  try {
    why = why_unfit(tensor);
    if (why.empty() && tensor.numel() != 0) data = static_cast<std::byte*>(tensor.data_ptr());
  } catch (const std::exception& error) {  // of torch, for tensors whose memory it guards
    why = text_of(&error);
  }
  {
    MutexLock lock(mutex_);
    if (registered_.window) why = "a tensor is registered with this window already. Next: tensor_deregister first";
  }
  std::optional<nvx::Window::Memory> mine;
  if (why.empty()) {
    const nvx::Window::Share share{uint64_t(tensor.numel()), uint32_t(tensor.element_size()),
                                   uint32_t(tensor.scalar_type())};
    mine = {data, share, std::make_shared<const at::Tensor>(tensor)};
  }
  const auto open = [&] { return current->group().open_window(mine); };
  const std::shared_ptr<nvx::Window> window = as_argument("tensor_register", open, why);
  current->has_memory_for_peers = true;
  MutexLock lock(mutex_);
  registered_ = {window, tensor};
}

void TensorWindow::tensor_deregister() {
  const auto current = communicator();
  const Registered mine = registered("tensor_deregister");
  const Status status = mine.window->close();
  {
    MutexLock lock(mutex_);
    registered_ = {};
  }
  if (!status.ok()) raise(status);
}

IntrusiveWork TensorWindow::begin(Communicator& communicator, const char* title, const at::Tensor& tensor,
                                  std::shared_ptr<Message> message, std::chrono::milliseconds timeout, bool receives,
                                  bool async) {
  const CallRecord record(title, tensor);
  const auto type = receives ? c10d::OpType::RECV : c10d::OpType::SEND;
  auto work = communicator.messages.begin({type, title}, tensor, std::move(message), timeout, receives);
  if (!async) work->wait(std::chrono::milliseconds(0));
  return work;
}

IntrusiveWork TensorWindow::put(const at::Tensor& tensor, int64_t rank, int64_t offset, bool async,
                                const c10d::PutOptions& opts) {
  const auto current = communicator();
  const Registered mine = registered("put");
  const int target = peer_of("put", rank, current->context.size);
  if (const std::string why = why_unfit(tensor); !why.empty()) refuse_call("put", why);
  const auto there = at::ScalarType(mine.window->share(target).type);
  if (tensor.scalar_type() != there)
    refuse_call("put", "dtype ", tensor.scalar_type(), " does not match rank ", target, "'s registered dtype ", there);
  if (offset < 0) refuse_call("put", "the offset must not be negative; got ", offset);
  auto message = as_argument("put", [&] {
    return mine.window->put(target, uint64_t(offset), static_cast<const std::byte*>(tensor.const_data_ptr()),
                            uint64_t(tensor.numel()));
  });
  return begin(*current, "nvx:put", tensor, std::move(message), opts.timeout, /*receives=*/false, async);
}

IntrusiveWork TensorWindow::signal(int64_t rank, bool async, const c10d::SignalOptions& opts) {
  const auto current = communicator();
  const Registered mine = registered("signal");
  auto message = mine.window->signal(peer_of("signal", rank, current->context.size));
  return begin(*current, "nvx:signal", at::empty({0}, at::kByte), std::move(message), opts.timeout, /*receives=*/false,
               async);
}

IntrusiveWork TensorWindow::wait_signal(int64_t rank, bool async, const c10d::WaitSignalOptions& opts) {
  const auto current = communicator();
  const Registered mine = registered("wait_signal");
  auto message = mine.window->wait_signal(peer_of("wait_signal", rank, current->context.size));
  return begin(*current, "nvx:wait_signal", at::empty({0}, at::kByte), std::move(message), opts.timeout,
               /*receives=*/true, async);
}

at::Tensor TensorWindow::map_remote_tensor(int64_t rank) {
  const auto current = communicator();
  const Registered mine = registered("map_remote_tensor");
  if (peer_of("map_remote_tensor", rank, current->context.size) == current->context.rank) return mine.tensor;
  refuse_call("map_remote_tensor", "windows do not map the memory of other ranks, and rank ", rank,
              " is another rank. Next: use put");
}

/// Completed writes are visible to every reader: host memory has no other copy.
c10d::WindowAttr TensorWindow::get_attr(int64_t rank) {
  const auto current = communicator();
  (void)registered("get_attr");
  peer_of("get_attr", rank, current->context.size);
  return {};
}

}  // namespace nvx

#endif
