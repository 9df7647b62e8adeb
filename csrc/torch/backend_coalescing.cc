// c10d's coalescing coalescing scope: what a thread issues between their begin and end is waited for as one work.

#include "base/log.h"
#include "torch/backend.h"

namespace nvx {

/// If a coalescing scope is still open, an exception has left it so: torch does not close it then. All that was issued
/// in it runs nevertheless, and so does what was issued since.
void ProcessGroupNVX::startCoalescing() {
  origin_.check(rank_);
  CoalescingScope left;
  MutexLock lock(mutex_);
  const auto [scope, fresh] = scopes_.try_emplace(std::this_thread::get_id());
  left = std::exchange(scope->second, CoalescingScope());
  if (fresh) open_scopes_.fetch_add(1, std::memory_order_release);
  lock.unlock();
  if (!fresh) {
    NVX_LOG(kWarn,
            "group %s: a coalescing scope is begun, and the one before it was never ended, as when an exception comes "
            "out of it: nobody waits for the %zu operations issued since as for one",
            group_->name().c_str(), left.issued);
  }
}

bool ProcessGroupNVX::collects() {
  if (open_scopes_.load(std::memory_order_acquire) == 0) [[likely]]
    return false;
  MutexLock lock(mutex_);
  return scopes_.contains(std::this_thread::get_id());
}

void ProcessGroupNVX::into_coalescing_scope(const c10::intrusive_ptr<NvxWork>& work) {
  if (open_scopes_.load(std::memory_order_acquire) == 0) [[likely]]
    return;
  std::vector<c10::intrusive_ptr<NvxWork>> gone;
  MutexLock lock(mutex_);
  const auto scope = scopes_.find(std::this_thread::get_id());
  if (scope == scopes_.end()) return;  // the open ones are other threads'
  scope->second.add(work, gone);
  lock.unlock();
}

void ProcessGroupNVX::CoalescingScope::add(const c10::intrusive_ptr<NvxWork>& work,
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
  CoalescingScope scope;
  {
    MutexLock lock(mutex_);
    const auto open = scopes_.find(std::this_thread::get_id());
    if (open == scopes_.end()) return nullptr;
    scope = std::move(open->second);
    scopes_.erase(open);
    open_scopes_.fetch_sub(1, std::memory_order_release);
  }
  kernels_->catch_up_if_behind();
  if (scope.works.empty()) return nullptr;
  if (scope.works.size() == 1) return scope.works.front();
  Tensors outputs;
  for (const auto& work : scope.works) {
    if (work->type() == c10d::OpType::SEND) continue;
    const Tensors own = work->result();
    outputs.insert(outputs.end(), own.begin(), own.end());
  }
  auto all = c10::make_intrusive<CoalescedWork>(facts({c10d::OpType::COALESCED, nullptr}), std::move(scope.works),
                                                std::move(outputs));
  all->begin();
  return all;
}

}  // namespace nvx
