#include "torch/call/groups.h"

#include <fcntl.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "group/setup/store_notes.h"
#include "torch/call/gloo_ranks.h"
#include "torch/core/interrupt.h"
#include "torch/core/store.h"

namespace nvx {
namespace {

/// Fills the numbers of a closed stdin, stdout or stderr: shared memory or a socket that got one of them would receive
/// whatever the process prints. Files that the process has opened before, such as torch's store, keep theirs.
void fill_standard_descriptors() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) == -1) (void)open("/dev/null", O_RDWR);  // takes the lowest free number
  }
}

}  // namespace

GroupOptions group_options(int rank, int size, const NvxOptions& options) {
  GroupOptions facts;
  facts.name = options.group_name.empty() ? "unnamed" : options.group_name;
  facts.rank = rank;
  facts.size = size;
  facts.timeout = config().timeout.count() > 0 ? config().timeout : options.timeout;  // of set-up, too
  facts.kernels = options.kernels;
  facts.tune = options.tune;
  facts.global_ranks = options.global_ranks_in_group;
  if (facts.global_ranks.empty() && !options.ranks_unknown) {  // the default group
    facts.whole_job = true;
    for (int r = 0; r < size; ++r) facts.global_ranks.push_back(uint64_t(r));
  }
  return facts;
}

std::shared_ptr<Group> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const NvxOptions& options, std::function<bool()> aborted,
                                  std::vector<EarlierProcess> processes) {
  fill_standard_descriptors();
  if (store && size >= 1 && rank >= size) {
    TorchStore torch_store(store, size);
    publish_world_size(torch_store, rank, size);
  }
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "nvx: group ", options.group_name, " cannot have rank ",
                    rank, " of ", size, ". Next: give a world size of at least 1, and a rank below it");
  TORCH_CHECK_VALUE(store, "nvx: rank ", rank, " of group ", options.group_name,
                    " needs a store. Next: give one that all ranks reach, such as a TCPStore");
  GroupOptions facts = group_options(rank, size, options);
  const auto torch_store = std::make_shared<TorchStore>(store, size, facts.timeout, aborted);
  facts.processes = std::move(processes);
  try {
    std::shared_ptr<GlooRanks> gloo_ranks;
    if (options.replaces_gloo && size > 1)
      gloo_ranks = std::make_shared<GlooRanks>(torch_store, facts.name, rank, size);
    facts.aborted = [gloo_ranks, aborted = std::move(aborted)] {
      if (gloo_ranks) gloo_ranks->check();
      return aborted && aborted();
    };
    auto group = std::make_shared<Group>(*torch_store, facts);
    if (gloo_ranks) gloo_ranks->leave();
    raise_interrupt();  // a request to the store may have been interrupted while the set-up still succeeded
    return group;
  } catch (const Error& error) {
    raise_interrupt();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

Groups::Groups(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group, const NvxOptions& options)
    : store_(std::move(store)), group_(std::move(group)), options_(options) {
  options_.replaces_gloo = false;  // in `group_` alone
}

const std::shared_ptr<Group>& Groups::of(std::span<const TensorOperation> collectives) {
  if (device_of(collectives).is_cpu() || collectives.front().operation.collective == kernel::Collective::kBarrier)
    return group_;
  return of_devices();
}

c10::intrusive_ptr<c10d::Store> Groups::store_of_devices() const {
  return store_ ? c10::make_intrusive<c10d::PrefixStore>("nvx/device", store_) : nullptr;
}

const std::shared_ptr<Group>& Groups::of_devices() {
  // The acquire load makes `device_group_`, and the group that it points to, visible to this thread.
  if (has_device_group_.load(std::memory_order_acquire)) return device_group_;
  if (maker_.is_this_thread()) raise(group_->reentrant());
  MutexLock lock(making_);
  if (device_group_) return device_group_;
  const auto held = maker_.hold();
  if (const Status status = group_->check_alive(); !status.ok()) raise(status);
  const NvxOptions given = options();
  device_group_ = make_group(store_of_devices(), group_->rank(), group_->size(), given,
                             [group = group_] { return group->failed() || group->closed(); });
  // An abort or leave of `group_` before this point did not see `device_group_`; repeat it here. This thread stores the
  // flag and then loads failed() and closed(). abort() and leave() end `group_`, which stores the values that these
  // load, and then load the flag, in all(). All six accesses are seq_cst, so at least one side sees the other's store.
  // The lock does the same for set_timeout().
  MutexLock published(mutex_);
  if (options_.timeout != given.timeout) device_group_->set_timeout(options_.timeout);
  has_device_group_.store(true, std::memory_order_seq_cst);
  published.unlock();
  if (group_->failed()) device_group_->abort("");
  if (group_->closed()) device_group_->leave();
  return device_group_;
}

std::vector<std::shared_ptr<Group>> Groups::all() const {
  if (!has_device_group_.load(std::memory_order_seq_cst)) return {group_};  // see of_devices()
  return {group_, device_group_};
}

void Groups::abort(const std::string& why) {
  group_->abort(why);  // before all() loads the flag: see of_devices()
  for (const auto& group : all()) group->abort(why);
}

void Groups::leave() {
  group_->leave();  // before all() loads the flag: see of_devices()
  for (const auto& group : all()) group->leave();
}

void Groups::set_timeout(std::chrono::milliseconds timeout) {
  MutexLock lock(mutex_);
  options_.timeout = timeout;
  for (const auto& group : all()) group->set_timeout(timeout);
}

NvxOptions Groups::options() {
  MutexLock lock(mutex_);
  return options_;
}

std::pair<int64_t, int64_t> Groups::global_ranks() {
  MutexLock lock(mutex_);
  const auto& ranks = options_.global_ranks_in_group;
  if (ranks.empty()) return {0, 1};
  const auto first = int64_t(ranks[0]), stride = ranks.size() > 1 ? int64_t(ranks[1]) - first : 1;
  for (size_t r = 0; r < ranks.size(); ++r)
    if (int64_t(ranks[r]) != first + int64_t(r) * stride) return {first, -1};
  return {first, stride};
}

}  // namespace nvx
