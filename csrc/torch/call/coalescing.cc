#include "torch/call/coalescing.h"

#include <algorithm>
#include <iterator>

namespace nvx {

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
  std::vector<c10::intrusive_ptr<NvxWork>> gone;
  MutexLock lock(mutex_);
  const auto known = scopes_.find(std::this_thread::get_id());
  if (known == scopes_.end()) return;  // the open scopes belong to other threads
  CoalescingScope& scope = known->second;
  if (scope.works.size() >= scope.most) {
    const auto first =
        std::stable_partition(scope.works.begin(), scope.works.end(), [](const auto& w) { return !w->settled(); });
    gone.assign(std::move_iterator(first), std::move_iterator(scope.works.end()));
    scope.works.erase(first, scope.works.end());
    scope.most = std::max(scope.most, 2 * scope.works.size());
  }
  scope.works.push_back(work);
  ++scope.issued;
  lock.unlock();
}

bool CoalescingScopes::add(const DelegatedMessage& message) {
  if (open_.load(std::memory_order_acquire) == 0) return false;
  MutexLock lock(mutex_);
  const auto known = scopes_.find(std::this_thread::get_id());
  if (known == scopes_.end()) return false;
  known->second.delegated.push_back(message);
  ++known->second.issued;
  return true;
}

}  // namespace nvx
