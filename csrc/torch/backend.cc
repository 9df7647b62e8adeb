// A backend's beginning, and its groups.

#include "torch/backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/config.h"
#include "torch/interrupt.h"
#include "torch/registry.h"
#include "torch/store.h"

namespace nvx {
namespace {

GroupOptions group_options(int rank, int size, const ProcessGroupNVX::Options& options) {
  GroupOptions facts;
  facts.name = options.group_name.empty() ? "unnamed" : options.group_name;
  facts.rank = rank;
  facts.size = size;
  facts.timeout = options.timeout;
  facts.global_ranks = options.global_ranks_in_group;
  if (facts.global_ranks.empty() && !options.ranks_unknown) {  // the default group
    for (int r = 0; r < size; ++r) facts.global_ranks.push_back(uint64_t(r));
  }
  return facts;
}

int checked_rank(int rank, int size) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "ProcessGroupNVX: rank ", rank, " of ", size,
                    " ranks cannot be");
  return rank;
}

std::shared_ptr<Group> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const ProcessGroupNVX::Options& options, std::function<bool()> unwanted = {}) {
  TORCH_CHECK_VALUE(store, "ProcessGroupNVX: needs a store");
  TorchStore torch_store(store, size);
  GroupOptions facts = group_options(rank, size, options);
  facts.unwanted = std::move(unwanted);
  try {
    return std::make_shared<Group>(torch_store, facts);
  } catch (const Error& error) {
    raise_interrupt();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

}  // namespace

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(store, make_group(store, checked_rank(rank, size), size, options ? *options : Options()),
                      options ? *options : Options()) {}

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
                                 const Options& options)
    : Backend(group->rank(), group->size()),
      store_(std::move(store)),
      group_(std::move(group)),
      kernels_(std::make_shared<KernelPath>(group_, store_)),
      proxies_(group_, device_store(), [this]() -> const std::shared_ptr<Group>& { return device_group(); }),
      options_(options) {
  init();
  if (!config().delegate.empty() && size_ > 1) {
    delegate_ = std::make_shared<Delegate>(group_, store_, [this] {
      kernels_->catch_up();  // else the other ranks might wait for what was put off here, and this host for them
      return device_group();
    });
  }
  Registry::here().add(*this);
}

/// Where peers may write to this rank's memory at any time, a thread of the group's own waits for that. It would keep
/// the group.
ProcessGroupNVX::~ProcessGroupNVX() {
  Registry::here().remove(*this);
  if (has_memory_for_peers_) group_->leave();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupNVX::getBackendOptions() {
  origin_.check(rank_);
  MutexLock lock(mutex_);
  return c10::make_intrusive<Options>(options_);  // a copy, as torch changes what it gets
}

/// Collectives of a device's tensors have an order of their own, as if they had another backend: those of a
/// checkpoint's CPU tensors, say, may run beside them, on another thread. So they have a group of their own. It is made
/// when the first of them is called, which is a step of all ranks. A barrier belongs to the CPU's group, as torch sees
/// it.
const std::shared_ptr<Group>& ProcessGroupNVX::group_of(const TensorOperations& collectives) {
  if (device_of(collectives).is_cpu() || collectives.front().operation.collective == kernel::Collective::kBarrier)
    return group_;
  return device_group();
}

c10::intrusive_ptr<c10d::Store> ProcessGroupNVX::device_store() const {
  return store_ ? c10::make_intrusive<c10d::PrefixStore>("nvx/device", store_) : nullptr;
}

const std::shared_ptr<Group>& ProcessGroupNVX::device_group() {
  if (has_device_group_.load(std::memory_order_acquire)) return device_group_;  // and with it what it points to
  MutexLock lock(device_group_mutex_);
  if (device_group_) return device_group_;
  const Options options = [this] {
    MutexLock reading(mutex_);
    return options_;
  }();
  if (const Status status = group_->check_alive(); !status.ok()) raise(status);
  device_group_ = make_group(device_store(), rank_, size_, options,
                             [group = group_] { return group->failed() || group->closed(); });
  // An abort or leave of group_ before this point did not see device_group_; repeat it here. Here the flag is stored,
  // and then failed() and closed() are loaded. abort() and shutdown() store what these load, by ending group_, and then
  // load the flag, in groups(). All six are seq_cst, so at least one side sees the other's store.
  has_device_group_.store(true, std::memory_order_seq_cst);
  if (group_->failed()) device_group_->abort("");
  if (group_->closed()) device_group_->leave();
  return device_group_;
}

std::vector<std::shared_ptr<Group>> ProcessGroupNVX::groups() const {
  if (!has_device_group_.load(std::memory_order_seq_cst)) return {group_};  // see device_group()
  return {group_, device_group_};
}

}  // namespace nvx
