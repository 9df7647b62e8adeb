#include "torch/backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <set>

#include "base/log.h"
#include "base/per_process.h"
#include "base/text.h"
#include "group/device/device_pools.h"
#include "torch/arguments/checks.h"
#include "torch/device/kernel_path.h"
#include "torch/device/pool.h"

namespace nvx {
namespace {

/// The options of a group that is made from this one. override: torch's.
NvxOptions options_of_child(const CallContext& parent, const c10::intrusive_ptr<c10d::Backend::Options>& override,
                            std::vector<uint64_t> global_ranks) {
  Group& group = parent.group();
  NvxOptions options(override ? override->timeout : group.timeout());
  if (override) options.group_name = override->group_name, options.group_desc = override->group_desc;
  const auto own = c10::dynamic_intrusive_pointer_cast<NvxOptions>(override);
  options.kernels = own && own->kernels ? own->kernels : group.core().members.kernels;
  options.tune = own && !own->tune.empty() ? own->tune : group.core().members.tune;
  options.barrier_on_host = parent.barrier_on_host;
  options.ranks_unknown = global_ranks.empty();
  options.global_ranks_in_group = std::move(global_ranks);
  return options;
}

c10::intrusive_ptr<c10d::Backend> child(Communicator& parent, const c10::intrusive_ptr<c10d::Store>& store,
                                        const NvxOptions& options, int rank, int size) {
  return c10::make_intrusive<ProcessGroupNVX>(store, parent.child(store, options, rank, size), options);
}

/// A tensor that other ranks of this host read in place. Without room for it, an ordinary one, which serves too.
at::Tensor host_tensor(const std::shared_ptr<ShmRegistry>& shm, int64_t size, const at::TensorOptions& options) {
  const bool fits = size > 0 && size_t(size) <= TensorMemory::kMost / options.dtype().itemsize();
  const size_t bytes = fits ? size_t(size) * options.dtype().itemsize() : 0;
  const Span span = bytes != 0 ? shm->tensors().allocate(bytes) : Span{};
  if (!span) return at::empty({size}, options);
  const auto free = [shm, span, made = fork_generation()](void*) mutable {
    shm->tensors().free(span);
    if (fork_generation() != made) new auto(std::move(shm));  // a forked child did not inherit the arena
  };
  return at::from_blob(shm->tensors().at(span), {size}, free, options);
}

}  // namespace

ProcessGroupNVX::ProcessGroupNVX(int rank, int size) : Backend(rank, size), published_rank_(rank) { init(); }

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(store, make_group(store, rank, size, options ? *options : Options()),
                      options ? *options : Options()) {}

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
                                 const Options& options)
    : Backend(group->rank(), group->size()),
      published_rank_(group->rank()),
      only_(std::make_shared<Communicator>(*this, listeners_, std::move(store), std::move(group), options)) {
  init();
}

/// Counts no reference, which would cost two atomic operations a call: this object outlives the call.
ProcessGroupNVX::Current ProcessGroupNVX::active_or_null() const {
  check_process();
  return {Current(), only_.get()};
}

void ProcessGroupNVX::startCoalescing() {
  const auto current = active();
  if (const std::optional<CoalescingScope> left = current->context.scopes.open()) {
    (void)current->messages.begin_delegated(*left);  // its ranks may wait for them
    NVX_LOG(
        kWarn,
        "group %s: a coalescing scope begins, and the one before it never ended, perhaps because an exception left it: "
        "the %zu operations issued in it have no Work",
        current->group().name().c_str(), left->issued);
  }
}

IntrusiveWork ProcessGroupNVX::endCoalescing() {
  const auto current = active();
  std::optional<CoalescingScope> scope = current->context.scopes.close();
  if (!scope) return nullptr;
  current->issuer.kernels().flush_if_postponed();
  if (auto batch = current->messages.begin_delegated(*scope)) scope->works.push_back(std::move(batch));
  if (scope->works.empty()) return nullptr;
  if (scope->works.size() == 1) return scope->works.front();
  Tensors outputs;
  for (const auto& work : scope->works) {
    if (work->type() == c10d::OpType::SEND) continue;
    const Tensors own = work->result();
    outputs.insert(outputs.end(), own.begin(), own.end());
  }
  auto all = c10::make_intrusive<CoalescedWork>(current->context.facts({c10d::OpType::COALESCED, nullptr}),
                                                std::move(scope->works), std::move(outputs));
  all->begin();
  return all;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  const auto current = active();
  Group& group = current->group();
  const auto me = std::ranges::find(ranks, group.rank());
  if (me == ranks.end()) return nullptr;
  // The ranks in the options are this group's, or none: torch does not update them.
  std::vector<uint64_t> global;
  if (const auto& mine = group.topology().global_ranks; !mine.empty()) {
    for (const int rank : ranks) global.push_back(mine.at(size_t(rank)));
  }
  return child(*current, store, options_of_child(current->context, opts, std::move(global)), int(me - ranks.begin()),
               int(ranks.size()));
}

/// Makes a group of the ranks of several groups, which torch has renumbered. They connect over a store of their own.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                                         const int& rank, const int& size) {
  const auto current = active();
  return child(*current, store, options_of_child(current->context, opts, {}), rank, size);
}

/// Only the remaining ranks call this. They connect over this group's store, whatever the state of the group.
c10::intrusive_ptr<c10d::Backend> ProcessGroupNVX::shrink(const std::vector<int64_t>& excluded, int flags,
                                                          const c10::intrusive_ptr<c10d::Backend::Options>& override) {
  constexpr int kAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
  const auto current = active();
  Group& group = current->group();
  const int me = group.rank(), size = group.size();
  std::set<int64_t> gone(excluded.begin(), excluded.end());
  const Checks args("shrink_group", group);
  if (gone.size() != excluded.size() || gone.empty() || *gone.begin() < 0 || *gone.rbegin() >= size)
    args.invalid("excluded ranks must be distinct ranks of 0..", size - 1, "; got ", excluded);
  if (gone.contains(me))
    throw_argument_error("nvx: shrink_group: ", group.core().diagnosis.me(), " is excluded, so it must not call ",
                         "shrink_group. Next: call it on the ranks that stay only");
  if (flags & kAbort) current->abort();
  const auto& ranks = group.topology().global_ranks;
  std::vector<EarlierProcess> all = group.processes(), processes;
  std::vector<uint64_t> global;
  std::vector<std::string> without;
  for (const int64_t rank : gone) without.push_back(std::to_string(rank));
  int rank = 0, left = 0;
  for (int r = 0; r < size; ++r) {
    if (gone.contains(r)) continue;
    if (r == me) rank = left;
    ++left;
    processes.push_back(std::move(all[size_t(r)]));
    if (!ranks.empty()) global.push_back(ranks.at(size_t(r)));
  }
  auto options = c10::make_intrusive<Options>(options_of_child(current->context, override, std::move(global)));
  options->group_name = group.name() + ":shrunk";
  auto store =
      c10::make_intrusive<c10d::PrefixStore>("nvx/without/" + joined(without, ","), current->context.groups.store());
  auto smaller = make_group(store, rank, left, *options, {}, std::move(processes));
  return c10::make_intrusive<ProcessGroupNVX>(std::move(store), std::move(smaller), *options);
}

void ProcessGroupNVX::registerOnCompletionHook(Listeners::OnCompletion&& hook) {
  check_process();
  Listeners::OnCompletion seen = hook;  // torch only checks that there is a hook
  const bool first = listeners_.set_on_completion(std::move(hook));
  if (first) onCompletionHook_.swap(seen);
  TORCH_CHECK(first, "ProcessGroupNVX OnCompletion hook already registered");
}

at::Tensor ProcessGroupNVX::allocateTensor(long size, at::TensorOptions options) {
  const auto current = active();
  at::Device device = options.device();
  if (device.type() == kernel_device() && !device.has_index() && supports(device)) {
    const auto bound = getBoundDeviceId();
    device = bound && bound->type() == device.type() ? *bound : c10::impl::VirtualGuardImpl(device.type()).getDevice();
    options = options.device(device);
  }
  if (device.is_cpu()) return host_tensor(current->group().core().members.shm, size, options);
  if (device.type() != kernel_device() || device.index() < 0 || !current->has_memory_of(device.index())) {
    throw_argument_error("nvx: group " + current->group().name() + " cannot allocate tensors on " + device.str() +
                         ", where nvx has no memory for them. Next: use torch.empty");
  }
  return pool_tensor(size, options);
}

std::optional<PoolStats> ProcessGroupNVX::pool_stats() {
  const auto current = active_or_null();
  return current ? current->group().device().pool_stats() : std::nullopt;
}

}  // namespace nvx
