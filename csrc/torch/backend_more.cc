// The parts of the backend that are not collectives: messages, windows, sparse tensors, splitting, hooks, the end.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <set>

#include "group/device_pools.h"
#include "memory/beside_captures.h"
#include "torch/argument_error.h"
#include "torch/backend.h"
#include "torch/hook.h"
#include "torch/interrupt.h"
#include "torch/pool.h"
#include "torch/recorded.h"
#include "torch/registry.h"
#include "torch/sparse.h"
#include "torch/store.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kGrace{300};

}  // namespace

std::pair<int64_t, int64_t> ProcessGroupNVX::global_ranks() {
  MutexLock lock(mutex_);
  const auto& ranks = options_.global_ranks_in_group;
  if (ranks.empty()) return {0, 1};
  const auto first = int64_t(ranks[0]), stride = ranks.size() > 1 ? int64_t(ranks[1]) - first : 1;
  for (size_t r = 0; r < ranks.size(); ++r)
    if (int64_t(ranks[r]) != first + int64_t(r) * stride) return {first, -1};
  return {first, stride};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag,
                                                         bool receives) {
  if (!at::hasCallbacks()) [[likely]]
    return begin_transfer(kind, tensor, peer, tag, receives);
  const Tensors none, it{tensor};
  const auto [first, stride] = global_ranks();
  // Of a message torch does not say whether its caller waits at once.
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
  if (kernels_->is_behind()) kernels_->catch_up();
  Term term = term_of(c10d::kUnsetTimeout);
  auto message = std::make_shared<Message>();
  message->timeout = term.timeout;
  message->peer = peer;
  message->tag = tag;
  message->dtype = dtype_of(tensor);
  message->data = static_cast<std::byte*>(tensor.data_ptr());
  message->bytes = size_t(tensor.numel()) * tensor.element_size();
  auto work = c10::make_intrusive<MessageWork>(group_, facts(kind), tensor, std::move(message), std::move(term.claim),
                                               departures_);
  if (!tensor.is_cpu()) work->stage(tracks_, receives);
  work->count_in(pending_);
  work->begin(receives);
  into_window(work);
  return work;
}

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

/// A window that is still open was left so by an exception: torch does not close it, and what was issued in it has run
/// or will, like all that was issued since.
void ProcessGroupNVX::startCoalescing() {
  origin_.check(rank_);
  Window left;
  MutexLock lock(mutex_);
  const auto [window, fresh] = windows_.try_emplace(std::this_thread::get_id());
  left = std::exchange(window->second, Window());
  if (fresh) open_windows_.fetch_add(1, std::memory_order_release);
  lock.unlock();
  if (!fresh) {
    NVX_LOG(kWarn,
            "group %s: a coalescing window is begun, and the one before it was never ended, as when an exception comes "
            "out of it: nobody waits for the %zu operations issued since as for one",
            group_->name().c_str(), left.issued);
  }
}

bool ProcessGroupNVX::collects() {
  if (open_windows_.load(std::memory_order_acquire) == 0) [[likely]]
    return false;
  MutexLock lock(mutex_);
  return windows_.contains(std::this_thread::get_id());
}

void ProcessGroupNVX::into_window(const c10::intrusive_ptr<NvxWork>& work) {
  if (open_windows_.load(std::memory_order_acquire) == 0) [[likely]]
    return;
  std::vector<c10::intrusive_ptr<NvxWork>> gone;
  MutexLock lock(mutex_);
  const auto window = windows_.find(std::this_thread::get_id());
  if (window == windows_.end()) return;  // another thread's
  window->second.add(work, gone);
  lock.unlock();
}

void ProcessGroupNVX::Window::add(const c10::intrusive_ptr<NvxWork>& work,
                                  std::vector<c10::intrusive_ptr<NvxWork>>& gone) {
  if (works.size() >= most) {
    const auto first = std::stable_partition(works.begin(), works.end(), [](const auto& w) { return !w->settled(); });
    gone.assign(std::move_iterator(first), std::move_iterator(works.end()));
    works.erase(first, works.end());
    most = std::max(most, 2 * works.size());
  }
  works.push_back(work);
  ++issued;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::endCoalescing() {
  origin_.check(rank_);
  Window window;
  {
    MutexLock lock(mutex_);
    const auto open = windows_.find(std::this_thread::get_id());
    if (open == windows_.end()) return nullptr;
    window = std::move(open->second);
    windows_.erase(open);
    open_windows_.fetch_sub(1, std::memory_order_release);
  }
  if (kernels_->is_behind()) kernels_->catch_up();
  if (window.works.empty()) return nullptr;
  if (window.works.size() == 1) return window.works.front();
  Tensors outputs;
  for (const auto& work : window.works) {
    if (work->type() == c10d::OpType::SEND) continue;
    const Tensors own = work->result();
    outputs.insert(outputs.end(), own.begin(), own.end());
  }
  auto all = c10::make_intrusive<WindowWork>(facts({c10d::OpType::COALESCED, nullptr}), std::move(window.works),
                                             std::move(outputs));
  all->begin();
  return all;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::all_reduce_sparse(Tensors& tensors,
                                                                  const c10d::AllreduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allreduce");
  args.check_list(tensors);
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    args.invalid("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  args.check_place(tensors[0]);
  origin_.check(rank_);
  if (!tensors[0].is_cpu()) return all_reduce_sparse_on_host(tensors[0], opts);
  if (!opts.asyncOp && !collects() && group_->lane().held_here()) raise(group_->inside_itself());
  Term term = term_of(opts.timeout);
  SparseWork::Call call{term.timeout, group_->next_number(), std::move(term.claim)};
  const auto work = c10::make_intrusive<SparseWork>(group_, facts({c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"}),
                                                    args, tensors, std::move(call));
  enqueue(work, group_->lane());
  if (opts.asyncOp || collects()) return work;
  work->wait(std::chrono::milliseconds(0));
  return work;
}

/// Of a device, whose sizes are not known before its stream has come to it: over when it returns, asynchronous or not.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::all_reduce_sparse_on_host(at::Tensor& tensor,
                                                                          const c10d::AllreduceOptions& opts) {
  refuse_capture(tensor.device());
  const BesideCaptures beside;
  const Movement movement;
  Tensors host{tensor.cpu()};
  c10d::AllreduceOptions now = opts;
  now.asyncOp = false;
  const auto work = all_reduce_sparse(host, now);
  if (work) work->wait();
  tensor.copy_(host[0]);
  const auto done = c10::make_intrusive<DoneWork>(facts({c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"}),
                                                  Tensors{tensor}, Tracks::of_caller(tensor.device()).up);
  done->begin();
  return done;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  origin_.check(rank_);
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  if (me == ranks.end()) return nullptr;
  // torch leaves the list of this group in the options, or none.
  std::vector<uint64_t> global;
  if (const auto& mine = group_->global_ranks(); !mine.empty()) {
    for (const int rank : ranks) global.push_back(mine.at(size_t(rank)));
  }
  return child(store, opts, int(me - ranks.begin()), int(ranks.size()), std::move(global));
}

/// The ranks of several groups, which torch has numbered anew, meet over a store of their own.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  origin_.check(rank_);
  return child(store, opts, rank, size, {});
}

/// Those that are left meet over the store of this group, whatever has become of it: only they call.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::shrink(const std::vector<int64_t>& excluded, int flags,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& override) {
  constexpr int kAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
  origin_.check(rank_);
  std::set<int64_t> gone(excluded.begin(), excluded.end());
  TORCH_CHECK_VALUE(gone.size() == excluded.size() && !gone.empty() && *gone.begin() >= 0 && *gone.rbegin() < size_,
                    "ProcessGroupNVX::shrink: excludes ranks of a group of ", size_, ", each once, and got ", excluded);
  TORCH_CHECK_VALUE(!gone.contains(rank_), "ProcessGroupNVX::shrink: rank ", rank_,
                    " is to be excluded, and calls it: only those that stay do");
  if (flags & kAbort) abort();
  auto options = c10::make_intrusive<Options>(override ? override->timeout : group_->timeout());
  options->group_name = group_->name() + ":shrunk";
  options->ranks_unknown = group_->global_ranks().empty();
  std::string without;
  for (const int64_t rank : gone) without += (without.empty() ? "" : ",") + std::to_string(rank);
  int rank = 0, left = 0;
  for (int r = 0; r < size_; ++r) {
    if (gone.contains(r)) continue;
    if (r == rank_) rank = left;
    ++left;
    if (!options->ranks_unknown) options->global_ranks_in_group.push_back(group_->global_ranks().at(size_t(r)));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>("nvx/without/" + without, store_);
  return c10::make_intrusive<ProcessGroupNVX>(std::move(store), rank, left, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::child(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         int rank, int size, std::vector<uint64_t> global_ranks) {
  const std::string name = opts ? opts->group_name : "";
  std::shared_ptr<Group> there;
  c10::intrusive_ptr<c10d::Store> its_store;  // let go when the lock is
  {
    // torch up to 2.13 asks once for each device type, with the same store and name.
    MutexLock lock(mutex_);
    const auto known = children_.find(name);
    if (known != children_.end()) its_store = known->second.store.lock();
    if (its_store && its_store == store) there = known->second.group.lock();
  }
  auto options = c10::make_intrusive<Options>(opts ? opts->timeout : group_->timeout());
  options->group_name = name;
  if (opts) options->group_desc = opts->group_desc;
  options->ranks_unknown = global_ranks.empty();
  options->global_ranks_in_group = std::move(global_ranks);
  if (there && there->rank() == rank && there->size() == size && !there->closed())
    return c10::make_intrusive<ProcessGroupNVX>(store, std::move(there), *options);
  auto child = c10::make_intrusive<ProcessGroupNVX>(store, rank, size, options);
  MutexLock lock(mutex_);
  std::erase_if(children_, [](const auto& known) { return known.second.group.expired(); });
  children_.insert_or_assign(name, Child{c10::weak_intrusive_ptr<c10d::Store>(store), child->group_});
  return child;
}

void ProcessGroupNVX::setTimeout(std::chrono::milliseconds timeout) {
  origin_.check(rank_);
  for (const auto& group : groups()) group->set_timeout(timeout);
  MutexLock lock(mutex_);
  options_.timeout = timeout;
}

/// What was issued before, sends and receives too, and what concludes it; but not what has ended and calls this. Ctrl-C
/// ends the waiting.
void ProcessGroupNVX::waitForPendingWorks() {
  constexpr std::chrono::milliseconds kLookAround{50};
  origin_.check(rank_);
  kernels_->catch_up();
  while (pending_->load(std::memory_order_acquire) != NvxWork::told_here(pending_)) {
    if (group_->lane().held_here()) raise(group_->inside_itself());
    group_->lane().settle(kLookAround);
    group_->mail().settle(kLookAround);  // which is over at once where the group has failed
    group_->look_for_interrupt();
    raise_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

c10d::ErrorType ProcessGroupNVX::getError() {
  origin_.check(rank_);
  (void)group_->look_at_kernels();
  const auto all = groups();
  const auto failed = std::find_if(all.begin(), all.end(), [](const auto& group) { return group->failed(); });
  if (failed == all.end()) return c10d::ErrorType::SUCCESS;
  switch ((*failed)->failure().code()) {
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerDied:
    case Code::kPeerLeft:
    case Code::kPeerFailed: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

/// These two do nothing in a forked child: torch calls them where a group is destroyed there, and that is no mistake.
void ProcessGroupNVX::abort() {
  if (origin_.elsewhere()) return;
  failure_told_.store(true);
  if (const auto hooks = begin_abort_hooks()) hooks->await_moment();
  group_->abort("");  // first: a group of devices' tensors that is just being made looks at it
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& group : groups()) group->abort("");
  if (delegate_) delegate_->abort();  // first: who launches may be in a call of it
  kernels_->catch_up();               // which are refused, and say so
}

/// What the user never waited for gets a moment to end well, as its peers may wait for it. Then it ends.
void ProcessGroupNVX::shutdown() {
  if (origin_.elsewhere()) return;
  kernels_->catch_up();
  const auto end = Clock::now() + kGrace;
  const auto left = [&] {
    const auto span = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    return std::max(std::chrono::milliseconds(0), span);
  };
  for (const auto& group : groups()) group->lane().settle(left());
  departures_->see_off(nullptr, [&] { return left().count() == 0; });
  group_->mail().settle(left());
  if (delegate_) delegate_->part();
  for (const auto& group : groups()) group->leave();
  raise_interrupt();
}

void ProcessGroupNVX::registerOnCompletionHook(CompletionHook&& hook) {
  origin_.check(rank_);
  CompletionHook seen = hook;  // only for torch to see that there is one
  auto kept = std::make_shared<const CompletionHook>(std::move(hook));
  MutexLock lock(mutex_);
  const bool first = completion_hook_ == nullptr;
  if (first) {
    onCompletionHook_.swap(seen);
    completion_hook_.swap(kept);
    hooked_at_ = Clock::now();
    listeners_.fetch_add(1, std::memory_order_release);
  }
  lock.unlock();
  TORCH_CHECK(first, "ProcessGroupNVX OnCompletion hook already registered");
}

void ProcessGroupNVX::tell(NvxWork& work) {
  std::shared_ptr<const CompletionHook> old_hook;
  {
    MutexLock lock(mutex_);
    if (work.began() >= hooked_at_) old_hook = completion_hook_;  // others may have listened before it
  }
  if (old_hook) {
    run_hook("a completion hook", [&] {
      const std::chrono::duration<float> active = work.duration();
      (*old_hook)(
          std::make_shared<c10d::WorkInfo>(work.type(), work.getSequencenumber(), work.began(), work.ended(), active));
    });
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  if (!work.status().ok() || work.lost())
    return tell_failure(work.status().ok() ? Code::kSystem : work.status().code());
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  c10d::CompletionHookArgs args;
  args.completionKey = work.getCompletionKey();
  if (timed_) args.duration_ms = work.duration().count();
  for (const auto& hook : completion_hooks_.all()) run_hook("a completion hook", [&] { (*hook)(args); });
#endif
}

#ifdef C10D_BACKEND_HAS_HOOKS

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  TensorOperations all;
  all.push_back(arguments("ProcessGroupNVX::gather_single").gather_base(output, input, opts.rootRank));
  Tensors inputs{input}, outputs;
  if (opts.rootRank == rank_) outputs.push_back(output);
  return launch({c10d::OpType::GATHER, "nvx:gather"}, std::move(all), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

void ProcessGroupNVX::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  origin_.check(rank_);
  extensions_->add(timeout);
}

void ProcessGroupNVX::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  origin_.check(rank_);
  if (abort_hooks_.put(id, std::move(hook))) listeners_.fetch_add(1, std::memory_order_release);
}

void ProcessGroupNVX::unregisterAbortHook(int64_t id) {
  if (!origin_.elsewhere() && abort_hooks_.drop(id)) listeners_.fetch_sub(1, std::memory_order_release);
}

#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15

void ProcessGroupNVX::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  origin_.check(rank_);
  if (completion_hooks_.put(id, std::move(hook))) listeners_.fetch_add(1, std::memory_order_release);
}

void ProcessGroupNVX::unregisterCompletionHook(int64_t id) {
  if (!origin_.elsewhere() && completion_hooks_.drop(id)) listeners_.fetch_sub(1, std::memory_order_release);
}

#endif

/// Once: whatever fails after that fails of the same. A wrong argument and Ctrl-C are no failures of the group. Nor is
/// the end of the process, in which hooks that need Python are killed on its threads.
void ProcessGroupNVX::tell_failure(Code code) {
  if (code == Code::kInvalid || code == Code::kInterrupted || exiting.load()) return;
  if (failure_told_.exchange(true)) return;
  if (const auto hooks = begin_abort_hooks()) hooks->await_moment();
}

/// What the recorder of torch 2.15 does in one takes seconds: who is to hear of the failure does not wait for that.
std::optional<HooksBeside> ProcessGroupNVX::begin_abort_hooks() {
#ifdef C10D_BACKEND_HAS_HOOKS
  auto hooks = abort_hooks_.all();
  if (hooks.empty()) return {};
  const auto self = c10::intrusive_ptr<ProcessGroupNVX>::reclaim_copy(this);  // hooks may ask it
  const auto run = [self, hooks = std::move(hooks)] {
    for (const auto& hook : hooks) {
      if (self->abort_hooks_.has(hook)) run_hook("an abort hook", *hook);
    }
  };
  if (!exiting.load()) return std::optional<HooksBeside>(std::in_place, run);
  run();  // nobody would wait for a thread any more
  return {};
#else
  return {};
#endif
}

/// torch calls this where init_process_group or new_group was given a device_id, when the group has been made. Whether
/// the other ranks were given one too nobody has said: they meet first, so that none waits for the others' first call.
void ProcessGroupNVX::eagerConnectSingleDevice(at::Device device) {
  origin_.check(rank_);
  if (device.is_cpu() || !serves(device)) return;
  const int there = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  std::string why_not;
  if (device.index() >= there) {
    why_not = "nvx: device_id is " + device.str() + ", and this process sees " + std::to_string(there) +
              " of them. Next: give the number of one that it sees (torch.accelerator.device_count())";
  }
  try {
    TorchStore store(store_, size_);
    if (!group_->meet_to_connect(store, why_not)) return;
  } catch (const Error& error) {
    raise_interrupt();
    if (!why_not.empty()) throw_argument_error(error.what());
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  const c10::OptionalDeviceGuard on(device);
  if (kernels_->agree_to_serve(device)) {
    (void)tracks_.of_kernels(device, 0);
  } else {
    (void)device_group();
    (void)tracks_.of(device);
  }
  if (delegate_) delegate_->connect(device);
}

bool ProcessGroupNVX::supportsTensorAlloc(c10::DeviceIndex device) {
  origin_.check(rank_);
  return device >= 0 && kernels_->may_serve(device) && has_pool(device);
}

at::Tensor ProcessGroupNVX::allocateTensor(long size, at::TensorOptions options) {
  origin_.check(rank_);
  const at::Device device = options.device();
  if (device.type() != kernel_device() || !supportsTensorAlloc(device.index())) {
    throw_argument_error("nvx: group " + group_->name() + " has no memory to hand out on " + device.str() +
                         ": supports_tensor_alloc says so before. Next: torch.empty; any tensor will do");
  }
  return pool_tensor(size, options);
}

std::optional<PoolStats> ProcessGroupNVX::pool_stats() {
  origin_.check(rank_);
  return group_->pool_stats();
}

}  // namespace nvx
