// What becomes of a backend after it was made: groups that are made out of it, timeouts, hooks, abort and end. And what
// torch asks for of a device beside collectives.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <set>

#include "group/device/device_pools.h"
#include "torch/arguments/argument_error.h"
#include "torch/backend.h"
#include "torch/device/pool.h"
#include "torch/hook.h"
#include "torch/interrupt.h"
#include "torch/registry.h"
#include "torch/store.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kGrace{300};

}  // namespace

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  origin_.check(rank_);
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  if (me == ranks.end()) return nullptr;
  // The ranks in the options are this group's, or none: torch leaves them there.
  std::vector<uint64_t> global;
  if (const auto& mine = group_->topology().global_ranks; !mine.empty()) {
    for (const int rank : ranks) global.push_back(mine.at(size_t(rank)));
  }
  return child(store, opts, int(me - ranks.begin()), int(ranks.size()), std::move(global));
}

/// Makes a group of the ranks of several groups, which torch has numbered anew. They meet over a store of their own.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  origin_.check(rank_);
  return child(store, opts, rank, size, {});
}

/// Only the ranks that stay call this. They meet over the store of this group, whatever has become of the group itself.
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
  options->ranks_unknown = group_->topology().global_ranks.empty();
  std::string without;
  for (const int64_t rank : gone) without += (without.empty() ? "" : ",") + std::to_string(rank);
  int rank = 0, left = 0;
  for (int r = 0; r < size_; ++r) {
    if (gone.contains(r)) continue;
    if (r == rank_) rank = left;
    ++left;
    if (!options->ranks_unknown)
      options->global_ranks_in_group.push_back(group_->topology().global_ranks.at(size_t(r)));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>("nvx/without/" + without, store_);
  return c10::make_intrusive<ProcessGroupNVX>(std::move(store), rank, left, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::child(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         int rank, int size, std::vector<uint64_t> global_ranks) {
  const std::string name = opts ? opts->group_name : "";
  std::shared_ptr<Group> there;
  c10::intrusive_ptr<c10d::Store> its_store;  // outlives the lock, under which it must not be destroyed
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

/// Waits for all that was issued before, sends and receives too, and for the callbacks and hooks of it. It does not
/// wait for a work whose callback or hook calls this. Ctrl-C ends the waiting.
void ProcessGroupNVX::waitForPendingWorks() {
  constexpr std::chrono::milliseconds kLookAround{50};
  origin_.check(rank_);
  kernels_->catch_up();
  while (pending_->load(std::memory_order_acquire) != NvxWork::told_here(pending_)) {
    if (group_->lane().held_here()) raise(group_->inside_itself());
    group_->lane().settle(kLookAround);
    group_->mail().settle(kLookAround);  // returns at once where the group has failed
    group_->look_for_interrupt();
    raise_interrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

c10d::ErrorType ProcessGroupNVX::getError() {
  origin_.check(rank_);
  const auto all = groups();
  for (const auto& group : all) (void)group->device().look();
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

/// abort() and shutdown() do nothing in a forked child: torch calls them when a group is destroyed there, which is
/// allowed.
void ProcessGroupNVX::abort() {
  if (origin_.elsewhere()) return;
  failure_told_.store(true);
  if (const auto hooks = begin_abort_hooks()) hooks->await_moment();
  call_off("");
}

void ProcessGroupNVX::call_off(const std::string& why) {
  if (origin_.elsewhere()) return;
  failure_told_.store(true);
  group_->abort(why);  // before groups() is asked: see device_group()
  for (const auto& group : groups()) group->abort(why);
  if (delegate_) delegate_->abort();  // before catch_up(), whose lock may be held by who is in a call of the delegate
  kernels_->catch_up();               // what was put off is refused now, and its works say so
}

/// Who has called a proxy, and waited for it, has not seen it end. Kernels that need no host get as long
/// (DeviceSide::part).
void ProcessGroupNVX::see_off_proxies(const Deadline& deadline) {
  for (const auto& group : groups()) {
    if (group == group_ || group->forked()) continue;
    const auto over = [&] { return group->device().is_quiet(); };
    while (!over() && group->device().look().ok() && !deadline.passed(Clock::now()))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Status status = group->device().look();
    if (status.ok() || status.code() == Code::kAborted || status.code() == Code::kInterrupted) continue;
    if (!group->heard() && !failure_told_.exchange(true))
      log_line("%s: what collectives of group %s have left on devices is not to be used", status.reason().c_str(),
               group->name().c_str());
  }
}

/// Operations that the user never waited for get a moment to end well, as peers may wait for them. Then they are ended.
void ProcessGroupNVX::shutdown() {
  if (origin_.elsewhere()) return;
  kernels_->catch_up();
  see_off_proxies(Deadline::after(kMostForProxies));
  failure_told_.store(true);  // what leaving calls off, here or on a peer that leaves too, is no failure
  const auto end = Clock::now() + kGrace;
  const auto left = [&] {
    const auto span = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    return std::max(std::chrono::milliseconds(0), span);
  };
  for (const auto& group : groups()) group->lane().settle(left());
  pending_sends_->see_off(nullptr, [&] { return left().count() == 0; });
  group_->mail().settle(left());
  if (delegate_) delegate_->part();
  group_->leave();  // before groups() is asked: see device_group()
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
    if (work.began() >= hooked_at_) old_hook = completion_hook_;  // a hook is not told of what began before it
  }
  if (old_hook) {
    run_hook("a completion hook", [&] {
      const std::chrono::duration<float> active = work.duration();
      (*old_hook)(
          std::make_shared<c10d::WorkInfo>(work.type(), work.getSequencenumber(), work.began(), work.ended(), active));
    });
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  if (const Status failure = work.failure(); !failure.ok() || work.lost())
    return tell_failure(failure.ok() ? Code::kSystem : failure.code());
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  c10d::CompletionHookArgs args;
  args.completionKey = work.getCompletionKey();
  if (timed_) args.duration_ms = work.duration().count();
  for (const auto& hook : completion_hooks_.all()) run_hook("a completion hook", [&] { (*hook)(args); });
#endif
}

#ifdef C10D_BACKEND_HAS_HOOKS

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

/// The hooks run beside, as that of torch 2.15's flight recorder takes seconds: whoever is to hear of the failure does
/// not wait for them.
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
  run();  // at the end of the process nobody would wait for a thread any more
  return {};
#else
  return {};
#endif
}

/// torch calls this when the group has been made, where init_process_group or new_group was given a device_id. Nobody
/// knows whether the other ranks were given one, too. So those that were meet first, and open the device only if all
/// have come: otherwise they would wait until the others make their first call.
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
    if (!group_->device().meet_to_connect(store, why_not)) return;
  } catch (const Error& error) {
    raise_interrupt();
    if (!why_not.empty()) throw_argument_error(error.what());
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  const c10::OptionalDeviceGuard on(device);
  if (kernels_->agree_to_serve(device)) {
    (void)comm_streams_.of_kernels(device, 0);
  } else {
    (void)device_group();
    (void)comm_streams_.of(device);
    if (!delegate_ && proxies_.agree_to_serve(device)) (void)comm_streams_.of_proxies(device, 0);
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
  return group_->device().pool_stats();
}

}  // namespace nvx
