// The life of a backend after its construction: groups made from it, timeouts, hooks, abort and end. Also torch's
// requests for a device other than collectives.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>

#include "group/device/device_pools.h"
#include "torch/backend.h"
#include "torch/core/argument_error.h"
#include "torch/core/interrupt.h"
#include "torch/core/store.h"
#include "torch/device/kernel_path.h"
#include "torch/device/pool.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kGrace{300};

/// The options of a group that is made from this one. override: torch's.
NvxOptions options_of_child(const Group& group, const c10::intrusive_ptr<c10d::Backend::Options>& override,
                            std::vector<uint64_t> global_ranks) {
  NvxOptions options(override ? override->timeout : group.timeout());
  if (override) options.group_name = override->group_name, options.group_desc = override->group_desc;
  options.ranks_unknown = global_ranks.empty();
  options.global_ranks_in_group = std::move(global_ranks);
  return options;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const Group& group = checked_group();
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  if (me == ranks.end()) return nullptr;
  // The ranks in the options are this group's, or none: torch does not update them.
  std::vector<uint64_t> global;
  if (const auto& mine = group.topology().global_ranks; !mine.empty()) {
    for (const int rank : ranks) global.push_back(mine.at(size_t(rank)));
  }
  return child(store, options_of_child(group, opts, std::move(global)), int(me - ranks.begin()), int(ranks.size()));
}

/// Makes a group of the ranks of several groups, which torch has renumbered. They meet over a store of their own.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  return child(store, options_of_child(checked_group(), opts, {}), rank, size);
}

/// Only the remaining ranks call this. They meet over this group's store, whatever the state of the group.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::shrink(const std::vector<int64_t>& excluded, int flags,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& override) {
  constexpr int kAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
  Group& group = checked_group();
  std::set<int64_t> gone(excluded.begin(), excluded.end());
  TORCH_CHECK_VALUE(gone.size() == excluded.size() && !gone.empty() && *gone.begin() >= 0 && *gone.rbegin() < size_,
                    "ProcessGroupNVX::shrink: excludes ranks of a group of ", size_, ", each once, and got ", excluded);
  TORCH_CHECK_VALUE(!gone.contains(rank_), "ProcessGroupNVX::shrink: rank ", rank_,
                    " is to be excluded, and calls it: only those that stay do");
  if (flags & kAbort) abort();
  auto options = c10::make_intrusive<Options>(override ? override->timeout : group.timeout());
  options->group_name = group.name() + ":shrunk";
  options->ranks_unknown = group.topology().global_ranks.empty();
  std::string without;
  for (const int64_t rank : gone) without += (without.empty() ? "" : ",") + std::to_string(rank);
  int rank = 0, left = 0;
  for (int r = 0; r < size_; ++r) {
    if (gone.contains(r)) continue;
    if (r == rank_) rank = left;
    ++left;
    if (!options->ranks_unknown) options->global_ranks_in_group.push_back(group.topology().global_ranks.at(size_t(r)));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>("nvx/without/" + without, context_.groups.store());
  return c10::make_intrusive<ProcessGroupNVX>(std::move(store), rank, left, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::child(const c10::intrusive_ptr<c10d::Store>& store, Options options,
                                                         int rank, int size) {
  const std::shared_ptr<Group> there = children_.find(options.group_name, store);
  if (there && there->rank() == rank && there->size() == size && !there->closed())
    return c10::make_intrusive<ProcessGroupNVX>(store, there, options);
  const std::shared_ptr<Group> made = make_group(store, rank, size, options);
  children_.add(options.group_name, store, made);
  return c10::make_intrusive<ProcessGroupNVX>(store, made, options);
}

void ProcessGroupNVX::setTimeout(std::chrono::milliseconds timeout) {
  (void)checked_group();
  context_.groups.set_timeout(timeout);
}

/// Waits for all operations issued before, including sends and receives, and for their callbacks and hooks. It does not
/// wait for a work whose callback or hook calls this. Ctrl-C ends the wait.
void ProcessGroupNVX::waitForPendingWorks() {
  constexpr std::chrono::milliseconds kLookAround{50};
  Group& group = checked_group();
  context_.kernels->catch_up();
  const auto all_ended = [&] {
    if (context_.pending->load(std::memory_order_acquire) == NvxWork::told_here(context_.pending)) return true;
    if (group.lane().held_here()) raise(group.inside_itself());
    group.lane().settle(kLookAround);
    group.mail().settle(kLookAround);  // returns at once if the group has failed
    group.look_for_interrupt();
    raise_interrupt();
    return false;
  };
  (void)look_until(all_ended, Deadline());
}

c10d::ErrorType ProcessGroupNVX::getError() {
  (void)checked_group();
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

/// abort() and shutdown() do nothing in a forked child. torch calls them when a group is destroyed there, which is
/// allowed.
void ProcessGroupNVX::abort() {
  if (context_.origin.elsewhere()) return;
  context_.listeners.tell_abort();
  call_off("");
}

void ProcessGroupNVX::call_off(const std::string& why) {
  if (context_.origin.elsewhere()) return;
  (void)context_.listeners.fall_silent();
  context_.groups.abort(why);
  issuer_.abort();               // before catch_up(), whose lock a call of the delegate may hold
  context_.kernels->catch_up();  // refuses the postponed operations, and fails their works
}

/// Operations that the program never waited for get a moment to succeed, because peers may wait for them. Then they are
/// aborted.
void ProcessGroupNVX::shutdown() {
  if (context_.origin.elsewhere()) return;
  context_.kernels->catch_up();
  see_off_proxies(Deadline::after(kMostForProxies));
  // An operation that fails because this rank leaves, or a peer does, has not failed for the hooks.
  (void)context_.listeners.fall_silent();
  const Deadline moment = Deadline::after(kGrace);
  for (const auto& group : groups()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(moment.end - Clock::now());
    group->lane().settle(std::max(std::chrono::milliseconds(0), left));
  }
  messages_.settle(moment);
  issuer_.part();
  context_.groups.leave();
  raise_interrupt();
}

void ProcessGroupNVX::registerOnCompletionHook(Listeners::OnCompletion&& hook) {
  (void)checked_group();
  Listeners::OnCompletion seen = hook;  // torch only checks that there is a hook
  const bool first = context_.listeners.set_on_completion(std::move(hook));
  if (first) onCompletionHook_.swap(seen);
  TORCH_CHECK(first, "ProcessGroupNVX OnCompletion hook already registered");
}

#ifdef C10D_BACKEND_HAS_HOOKS

void ProcessGroupNVX::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  (void)checked_group();
  context_.extensions->add(timeout);
}

void ProcessGroupNVX::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  (void)checked_group();
  context_.listeners.put_abort_hook(id, std::move(hook));
}

void ProcessGroupNVX::unregisterAbortHook(int64_t id) {
  if (!context_.origin.elsewhere()) context_.listeners.drop_abort_hook(id);
}

#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15

void ProcessGroupNVX::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  (void)checked_group();
  context_.listeners.put_completion_hook(id, std::move(hook));
}

void ProcessGroupNVX::unregisterCompletionHook(int64_t id) {
  if (!context_.origin.elsewhere()) context_.listeners.drop_completion_hook(id);
}

#endif

/// torch calls this when the group has been made, if init_process_group or new_group got a device_id. This rank does
/// not know whether the other ranks got one. So the ranks with a device_id meet first, and open the device only if all
/// ranks have come: otherwise they would wait until the others make their first call.
void ProcessGroupNVX::eagerConnectSingleDevice(at::Device device) {
  Group& group = checked_group();
  if (device.is_cpu() || !serves(device)) return;
  const int there = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  std::string why_not;
  if (device.index() >= there) {
    why_not = "nvx: device_id is " + device.str() + ", and this process sees " + std::to_string(there) +
              " of them. Next: give the number of one that it sees (torch.accelerator.device_count())";
  }
  try {
    TorchStore store(context_.groups.store(), size_);
    if (!group.device().meet_to_connect(store, why_not)) return;
  } catch (const Error& error) {
    raise_interrupt();
    if (!why_not.empty()) throw_argument_error(error.what());
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  issuer_.connect(device);
}

bool ProcessGroupNVX::supportsTensorAlloc(c10::DeviceIndex device) {
  (void)checked_group();
  return device >= 0 && context_.kernels->may_serve(device) && has_pool(device);
}

at::Tensor ProcessGroupNVX::allocateTensor(long size, at::TensorOptions options) {
  const Group& group = checked_group();
  const at::Device device = options.device();
  if (device.type() != kernel_device() || !supportsTensorAlloc(device.index())) {
    throw_argument_error("nvx: group " + group.name() + " has no memory to hand out on " + device.str() +
                         ": supports_tensor_alloc says so before. Next: torch.empty; any tensor will do");
  }
  return pool_tensor(size, options);
}

std::optional<PoolStats> ProcessGroupNVX::pool_stats() { return checked_group().device().pool_stats(); }

}  // namespace nvx
