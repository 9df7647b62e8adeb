#include "pool.h"

#include <map>
#include <memory>

#include "memory.h"

namespace fake {

namespace {

// All memory that pools ever received. An allocator may return it again, in other lengths, but only to pools.
struct Pooled {
  std::mutex mutex;
  std::map<const std::byte*, std::pair<const std::byte*, int>> blocks;  // first byte: end, device
};

Pooled& pooled() {
  static auto& all = *new Pooled();
  return all;
}

std::vector<std::unique_ptr<Pool>>& pools() {
  static auto& all = *new std::vector<std::unique_ptr<Pool>>();
  return all;
}

thread_local Pool* current = nullptr;

}  // namespace

void* Pool::take(size_t room, Queue& home) {
  std::unique_lock lock(mutex_);
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (kept->room != room || kept->home != &home) continue;
    void* at = kept->at;
    kept_.erase(kept);
    return at;
  }
  lock.unlock();
  void* at = malloc_(ssize_t(room), device_, &home);
  if (at == nullptr) {
    empty();
    at = malloc_(ssize_t(room), device_, &home);
  }
  if (at == nullptr) return nullptr;
  const auto* begin = static_cast<const std::byte*>(at);
  const std::lock_guard noting(pooled().mutex);
  auto& end = pooled().blocks[begin];
  end = {std::max(end.first, begin + room), device_};
  return at;
}

void Pool::keep(void* at, size_t room, Queue& home) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({at, room, &home});
}

void Pool::empty() {
  std::vector<Kept> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(kept_);
  }
  for (const Kept& one : all) free_(one.at, one.room, device_, one.home);
}

int64_t new_pool(int64_t device, int64_t malloc, int64_t free) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  pools().push_back(
      std::make_unique<Pool>(int(device), reinterpret_cast<Pool::Malloc>(malloc), reinterpret_cast<Pool::Free>(free)));
  return int64_t(pools().size()) - 1;
}

Pool& pool_of(int64_t number) { return *pools().at(size_t(number)); }
Pool* exchange_pool(Pool* pool) { return std::exchange(current, pool); }
Pool* current_pool(int device) { return current && current->device() == device ? current : nullptr; }

int device_of_pooled(const void* address) {
  const auto* at = static_cast<const std::byte*>(address);
  const std::lock_guard lock(pooled().mutex);
  auto after = pooled().blocks.upper_bound(at);
  while (after != pooled().blocks.begin()) {  // blocks of different lengths may overlap
    --after;
    if (at < after->second.first) return after->second.second;
    if (size_t(at - after->first) > (size_t{1} << 32)) break;
  }
  return -1;
}

}  // namespace fake
