// The life of a backend after its construction: groups made from it, timeouts, hooks, abort and end. Also torch's
// requests for a device other than collectives.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>

#include "group/device/device_pools.h"
#include "torch/backend.h"
#include "torch/core/argument_error.h"
#include "torch/device/pool.h"

namespace nvx {
namespace {

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
  const auto current = now();
  const Group& group = current->group();
  const auto me = std::find(ranks.begin(), ranks.end(), group.rank());
  if (me == ranks.end()) return nullptr;
  // The ranks in the options are this group's, or none: torch does not update them.
  std::vector<uint64_t> global;
  if (const auto& mine = group.topology().global_ranks; !mine.empty()) {
    for (const int rank : ranks) global.push_back(mine.at(size_t(rank)));
  }
  return child(*current, store, options_of_child(group, opts, std::move(global)), int(me - ranks.begin()),
               int(ranks.size()));
}

/// Makes a group of the ranks of several groups, which torch has renumbered. They meet over a store of their own.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  const auto current = now();
  return child(*current, store, options_of_child(current->group(), opts, {}), rank, size);
}

/// Only the remaining ranks call this. They meet over this group's store, whatever the state of the group.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::shrink(const std::vector<int64_t>& excluded, int flags,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& override) {
  constexpr int kAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
  const auto current = now();
  const Group& group = current->group();
  const int me = group.rank(), size = group.size();
  std::set<int64_t> gone(excluded.begin(), excluded.end());
  TORCH_CHECK_VALUE(gone.size() == excluded.size() && !gone.empty() && *gone.begin() >= 0 && *gone.rbegin() < size,
                    "ProcessGroupNVX::shrink: excludes ranks of a group of ", size, ", each once, and got ", excluded);
  TORCH_CHECK_VALUE(!gone.contains(me), "ProcessGroupNVX::shrink: rank ", me,
                    " is to be excluded, and calls it: only those that stay do");
  if (flags & kAbort) current->abort();
  auto options = c10::make_intrusive<Options>(override ? override->timeout : group.timeout());
  options->group_name = group.name() + ":shrunk";
  options->ranks_unknown = group.topology().global_ranks.empty();
  std::string without;
  for (const int64_t rank : gone) without += (without.empty() ? "" : ",") + std::to_string(rank);
  int rank = 0, left = 0;
  for (int r = 0; r < size; ++r) {
    if (gone.contains(r)) continue;
    if (r == me) rank = left;
    ++left;
    if (!options->ranks_unknown) options->global_ranks_in_group.push_back(group.topology().global_ranks.at(size_t(r)));
  }
  auto store = c10::make_intrusive<c10d::PrefixStore>("nvx/without/" + without, current->context.groups.store());
  return c10::make_intrusive<ProcessGroupNVX>(std::move(store), rank, left, std::move(options));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::child(Communicator& parent,
                                                         const c10::intrusive_ptr<c10d::Store>& store, Options options,
                                                         int rank, int size) {
  const std::shared_ptr<Group> there = parent.children.find(options.group_name, store);
  if (there && there->rank() == rank && there->size() == size && !there->closed())
    return c10::make_intrusive<ProcessGroupNVX>(store, there, options);
  const std::shared_ptr<Group> made = make_group(store, rank, size, options);
  parent.children.add(options.group_name, store, made);
  return c10::make_intrusive<ProcessGroupNVX>(store, made, options);
}

void ProcessGroupNVX::setTimeout(std::chrono::milliseconds timeout) { now()->context.groups.set_timeout(timeout); }

uint64_t ProcessGroupNVX::getSequenceNumberForGroup() {
  const auto current = standing();
  return current ? current->group().sequence() : 0;
}

void ProcessGroupNVX::waitForPendingWorks() {
  if (const auto current = standing()) current->wait_for_pending_works();
}

c10d::ErrorType ProcessGroupNVX::getError() { return now()->error(); }

/// torch calls abort() and shutdown() when a group is destroyed in a forked child, which is allowed.
void ProcessGroupNVX::abort() { only_->abort(); }

void ProcessGroupNVX::shutdown() { only_->shut_down(); }

void ProcessGroupNVX::registerOnCompletionHook(Listeners::OnCompletion&& hook) {
  check_process();
  Listeners::OnCompletion seen = hook;  // torch only checks that there is a hook
  const bool first = listeners_.set_on_completion(std::move(hook));
  if (first) onCompletionHook_.swap(seen);
  TORCH_CHECK(first, "ProcessGroupNVX OnCompletion hook already registered");
}

#ifdef C10D_BACKEND_HAS_HOOKS

void ProcessGroupNVX::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  now()->context.extensions->add(timeout);
}

void ProcessGroupNVX::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  check_process();
  listeners_.put_abort_hook(id, std::move(hook));
}

void ProcessGroupNVX::unregisterAbortHook(int64_t id) {
  if (!origin_.elsewhere()) listeners_.drop_abort_hook(id);
}

#endif

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15

void ProcessGroupNVX::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  check_process();
  listeners_.put_completion_hook(id, std::move(hook));
}

void ProcessGroupNVX::unregisterCompletionHook(int64_t id) {
  if (!origin_.elsewhere()) listeners_.drop_completion_hook(id);
}

#endif

/// torch calls this when the group has been made, if init_process_group or new_group got a device_id.
void ProcessGroupNVX::eagerConnectSingleDevice(at::Device device) { now()->connect(device); }

bool ProcessGroupNVX::supportsTensorAlloc(c10::DeviceIndex device) {
  const auto current = standing();
  return current && current->has_memory_of(device);
}

at::Tensor ProcessGroupNVX::allocateTensor(long size, at::TensorOptions options) {
  const auto current = now();
  const at::Device device = options.device();
  if (device.type() != kernel_device() || !current->has_memory_of(device.index())) {
    throw_argument_error("nvx: group " + current->group().name() + " has no memory to hand out on " + device.str() +
                         ": supports_tensor_alloc says so before. Next: torch.empty; any tensor will do");
  }
  return pool_tensor(size, options);
}

std::optional<PoolStats> ProcessGroupNVX::pool_stats() {
  const auto current = standing();
  return current ? current->group().device().pool_stats() : std::nullopt;
}

}  // namespace nvx
