#include "memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "graph.h"
#include "pool.h"

namespace fake {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kRoom = size_t{16} << 30;  // address range of one device; untouched pages take no memory
constexpr size_t kQuarantine = size_t{64} << 20;

std::byte* reserve(size_t bytes, int protection) {
  void* at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "no address space for the fake device's memory");
  return static_cast<std::byte*>(at);
}

// A graph may run again, so the end of its use of a block is unknown.
bool any_in_capture(const std::set<Queue*>& users) {
  return std::any_of(users.begin(), users.end(), [](const Queue* queue) { return queue->graph() != nullptr; });
}

// The positions of the queues that may still use a block.
std::vector<MarkPtr> marks_of(const std::set<Queue*>& users) {
  std::vector<MarkPtr> marks;
  for (Queue* queue : users) marks.push_back(queue->mark(Pace::kAtOnce));
  return marks;
}

class DeviceMemory {
 public:
  explicit DeviceMemory(c10::DeviceIndex device)
      : device_(device), addresses_(reserve(kRoom, PROT_NONE)), real_(reserve(kRoom, PROT_READ | PROT_WRITE)) {}

  bool holds(const void* address) const { return has_own(address) || device_of_pooled(address) == device_; }
  std::byte* real(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    return has_own(at) ? real_ + (at - addresses_) : const_cast<std::byte*>(at);
  }

  void* allocate(size_t bytes) {
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    Queue& home = current_queue(device_);
    Pool* const pool = current_pool(device_);
    auto* address = pool ? static_cast<std::byte*>(pool->take(room, home)) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, address || !pool, "fakegpu:", int(device_), " is out of memory: its pool is");
    {
      std::lock_guard lock(mutex_);
      if (!pool) address = addresses_ + take(room);
      blocks_[address] = {room, &home, {}, home.graph(), pool};
    }
    home.push(poison(address, room), Pace::kAtOnce);
    return address;
  }

  void release(std::byte* address) {
    Block block;
    {
      std::lock_guard lock(mutex_);
      block = std::move(blocks_.extract(address).mapped());
    }
    if (any_in_capture(block.users)) {
      count(kUnreusedFrees);
    } else if (block.graph) {  // the graph keeps it; the poison stands for the next tensor of the graph there
      if (block.graph->is_open()) block.home->push(poison(address, block.room), Pace::kAtOnce);
    } else {
      when_all(marks_of(block.users), [this, address, block] {
        block.home->push_now(poison(address, block.room), Pace::kAtOnce);
        if (block.pool) return block.pool->keep(address, block.room, *block.home);
        block.home->push_now([=, this] { rest(address, block.room); }, Pace::kAtOnce);
      });
    }
  }

  void record_use(const void* address, Queue& queue) {
    std::lock_guard lock(mutex_);
    auto found = blocks_.upper_bound(static_cast<std::byte*>(const_cast<void*>(address)));
    TORCH_CHECK(found != blocks_.begin(), "not memory of fakegpu:", int(device_));
    Block& block = std::prev(found)->second;
    if (block.home != &queue) block.users.insert(&queue);
  }

 private:
  struct Block {
    size_t room = 0;
    Queue* home = nullptr;
    std::set<Queue*> users;        // other than `home`
    std::shared_ptr<Graph> graph;  // the capture that allocated it
    Pool* pool = nullptr;          // the pool that owns it
  };

  bool has_own(const void* address) const { return address >= addresses_ && address < addresses_ + kRoom; }

  size_t take(size_t room) {
    auto& same = free_[room];
    if (!same.empty()) {
      const size_t offset = same.back();
      same.pop_back();
      return offset;
    }
    TORCH_CHECK(used_ + room <= kRoom, "fakegpu:", int(device_), " is out of memory");
    return std::exchange(used_, used_ + room);
  }

  std::function<void()> poison(std::byte* address, size_t room) {
    return [at = real(address), room] { std::memset(at, kPoison, room); };
  }

  // Delays the reuse of poisoned memory, so that late readers see the poison.
  void rest(std::byte* address, size_t room) {
    std::lock_guard lock(mutex_);
    resting_.emplace_back(address, room);
    resting_bytes_ += room;
    while (resting_bytes_ > kQuarantine) {
      auto [oldest, bytes] = resting_.front();
      resting_.pop_front();
      resting_bytes_ -= bytes;
      madvise(real(oldest), bytes, MADV_DONTNEED);
      free_[bytes].push_back(oldest - addresses_);
    }
  }

  const c10::DeviceIndex device_;
  std::byte* const addresses_;
  std::byte* const real_;
  std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;
  std::map<size_t, std::vector<size_t>> free_;  // offsets by size
  size_t used_ = 0;
  std::deque<std::pair<std::byte*, size_t>> resting_;
  size_t resting_bytes_ = 0;
};

DeviceMemory& memory_of(c10::DeviceIndex device) {
  static auto& all = *new std::vector<DeviceMemory*>([] {
    std::vector<DeviceMemory*> made;
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) made.push_back(new DeviceMemory(d));
    return made;
  }());
  return *all.at(device);
}

class PinnedMemory {
 public:
  void* allocate(size_t bytes) {
    void* at = std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage);
    TORCH_CHECK(at != nullptr, "no memory for ", bytes, " pinned bytes");
    std::memset(at, kPoison, bytes);
    std::lock_guard lock(mutex_);
    blocks_[static_cast<std::byte*>(at)] = {bytes, {}};
    return at;
  }

  void release(std::byte* at) {
    Block block;
    {
      std::lock_guard lock(mutex_);
      block = std::move(blocks_.extract(at).mapped());
    }
    if (any_in_capture(block.users)) {
      count(kUnreusedFrees);
      return;
    }
    when_all(marks_of(block.users), [this, at, bytes = block.bytes] {
      std::memset(at, kPoison, bytes);
      rest(at, bytes);
    });
  }

  bool holds(const void* address) {
    std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }

  void record_use(const void* address, Queue& queue) {
    std::lock_guard lock(mutex_);
    if (Block* block = find(address)) block->users.insert(&queue);
  }

 private:
  struct Block {
    size_t bytes = 0;
    std::set<Queue*> users;
  };

  Block* find(const void* address) {
    auto* at = static_cast<std::byte*>(const_cast<void*>(address));
    auto found = blocks_.upper_bound(at);
    if (found == blocks_.begin()) return nullptr;
    --found;
    return at < found->first + found->second.bytes ? &found->second : nullptr;
  }

  void rest(std::byte* at, size_t bytes) {
    std::lock_guard lock(mutex_);
    resting_.emplace_back(at, bytes);
    resting_bytes_ += bytes;
    for (; resting_bytes_ > kQuarantine; resting_.pop_front()) {
      std::free(resting_.front().first);
      resting_bytes_ -= resting_.front().second;
    }
  }

  std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;
  std::deque<std::pair<std::byte*, size_t>> resting_;
  size_t resting_bytes_ = 0;
};

PinnedMemory& pinned() {
  static auto& memory = *new PinnedMemory();
  return memory;
}

void free_device(void* address) { memory_of(device_of(address)).release(static_cast<std::byte*>(address)); }

void free_pinned(void* address) { pinned().release(static_cast<std::byte*>(address)); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kFake, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_device, device};
    count(kDeviceAllocations);
    void* address = memory_of(device.index()).allocate(bytes);
    return {address, address, &free_device, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    if (bytes == 0) return;
    current_queue(device_of(to)).push([to = real(to), from = real(from), bytes] { std::memcpy(to, from, bytes); });
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    count(kPinnedAllocations);
    forbid_beside_captures("memory of the host was pinned beside a capture");
    count(kPinnedBytes, int64_t(bytes));
    void* address = pinned().allocate(bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

bool is_device_address(const void* address) {
  for (c10::DeviceIndex d = 0; d < device_count(); ++d)
    if (memory_of(d).holds(address)) return true;
  return false;
}

c10::DeviceIndex device_of(const void* address) {
  for (c10::DeviceIndex d = 0; d < device_count(); ++d)
    if (memory_of(d).holds(address)) return d;
  TORCH_CHECK(false, "not an address of fakegpu: ", address);
}

std::byte* real(const void* address) {
  if (!is_device_address(address)) return static_cast<std::byte*>(const_cast<void*>(address));
  return memory_of(device_of(address)).real(address);
}

void record_use(const void* address, Queue& queue) {
  if (is_device_address(address)) memory_of(device_of(address)).record_use(address, queue);
}

c10::Allocator& device_allocator() {
  static auto& allocator = *new DeviceAllocator();
  return allocator;
}

bool is_pinned(const void* address) { return pinned().holds(address); }

void record_pinned_use(const void* address, Queue& queue) { pinned().record_use(address, queue); }

c10::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator();
  return allocator;
}

}  // namespace fake
