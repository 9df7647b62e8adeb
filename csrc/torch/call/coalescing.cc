#include "torch/call/coalescing.h"

#include <algorithm>
#include <iterator>

namespace nvx {

void CoalescingScope::add(const c10::intrusive_ptr<NvxWork>& work, Works& gone) {
  if (works.size() >= most) {
    const auto first = std::stable_partition(works.begin(), works.end(), [](const auto& w) { return !w->settled(); });
    gone.assign(std::move_iterator(first), std::move_iterator(works.end()));
    works.erase(first, works.end());
    most = std::max(most, 2 * works.size());
  }
  works.push_back(work);
  ++issued;
}

std::optional<CoalescingScope> CoalescingScopes::open() {
  MutexLock lock(mutex_);
  const auto [scope, fresh] = scopes_.try_emplace(std::this_thread::get_id());
  if (!fresh) return std::exchange(scope->second, CoalescingScope());
  open_.fetch_add(1, std::memory_order_release);
  return {};
}

std::optional<CoalescingScope> CoalescingScopes::close() {
  MutexLock lock(mutex_);
  const auto open = scopes_.find(std::this_thread::get_id());
  if (open == scopes_.end()) return {};
  std::optional<CoalescingScope> scope(std::move(open->second));
  scopes_.erase(open);
  open_.fetch_sub(1, std::memory_order_release);
  return scope;
}

bool CoalescingScopes::is_open() const {
  if (open_.load(std::memory_order_acquire) == 0) [[likely]]
    return false;
  MutexLock lock(mutex_);
  return scopes_.contains(std::this_thread::get_id());
}

void CoalescingScopes::add(const c10::intrusive_ptr<NvxWork>& work) {
  if (open_.load(std::memory_order_acquire) == 0) [[likely]]
    return;
  CoalescingScope::Works gone;
  MutexLock lock(mutex_);
  const auto scope = scopes_.find(std::this_thread::get_id());
  if (scope == scopes_.end()) return;  // the open scopes belong to other threads
  scope->second.add(work, gone);
  lock.unlock();
}

}  // namespace nvx
