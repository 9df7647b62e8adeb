#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <thread>
#include <utility>

#include "graph.h"

namespace fake {

namespace {

constexpr int64_t kPool = 14;      // streams of one priority: as many as two groups use, twice
constexpr int64_t kFirstNew = 32;  // above the default stream's 0, and the pools' numbers
constexpr int64_t kMostNew = 32;

struct Device {
  std::mutex mutex;
  std::map<c10::StreamId, Queue*> queues;  // never deleted: see Queue
  std::array<std::atomic<int64_t>, 2> pool_turns{};
  std::atomic<int64_t> new_turns{0};
};

std::array<Device, kMostDevices>& devices() {
  static auto& all = *new std::array<Device, kMostDevices>();
  return all;
}

thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<c10::StreamId, kMostDevices> this_stream{};

c10::DeviceIndex known(c10::DeviceIndex device) {
  if (device < 0) return this_device;
  TORCH_CHECK(device < device_count(), "there is no device fakegpu:", int(device));
  return device;
}

c10::Stream named(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device), id);
}

bool all_idle() {
  for (Device& device : devices()) {
    std::lock_guard lock(device.mutex);
    for (auto& [id, queue] : device.queues)
      if (!queue->idle()) return false;
  }
  return true;
}

}  // namespace

std::array<std::atomic<int64_t>, kCounters> counters{};
const std::array<const char*, kCounters> counter_names = {
    "stream_syncs",  "event_syncs",   "device_syncs",   "device_allocations", "pinned_allocations", "stream_waits",
    "data_recorded", "fallbacks",     "capture_faults", "unreused_frees",     "pinned_bytes",       "launches",
    "events_made",   "event_records", "stray_calls",    "devices_chosen",
};

c10::DeviceIndex device_count() {
  static const c10::DeviceIndex count = [] {
    const char* wanted = std::getenv("FAKE_DEVICE_COUNT");
    return c10::DeviceIndex(std::clamp(wanted ? std::atoi(wanted) : 2, 1, kMostDevices));
  }();
  return count;
}

c10::DeviceIndex current_device() { return this_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) { return std::exchange(this_device, known(device)); }

c10::Stream current_stream(c10::DeviceIndex device) {
  device = known(device);
  return named(device, this_stream[device]);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::DeviceIndex device = known(stream.device_index());
  return named(device, std::exchange(this_stream[device], stream.id()));
}

c10::Stream default_stream(c10::DeviceIndex device) { return named(known(device), 0); }

c10::Stream pool_stream(c10::DeviceIndex device, Priority priority) {
  device = known(device);
  const int64_t row = priority == Priority::kHigh;
  const int64_t turn = devices()[device].pool_turns[row]++ % kPool;
  return named(device, 1 + row * kPool + turn);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  device = known(device);
  return named(device, kFirstNew + devices()[device].new_turns++ % kMostNew);
}

Queue& queue_of(c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kFake, "not a stream of fakegpu: ", stream);
  const c10::DeviceIndex index = known(stream.device_index());
  Device& device = devices()[index];
  std::lock_guard lock(device.mutex);
  Queue*& queue = device.queues[stream.id()];
  if (queue == nullptr) queue = new Queue(uint64_t(index) * 1000 + uint64_t(stream.id()), index);
  return *queue;
}

Queue& current_queue(c10::DeviceIndex device) { return queue_of(current_stream(device)); }

void drain_device(c10::DeviceIndex index) {
  std::vector<std::pair<Queue*, uint64_t>> lasts;
  {
    Device& device = devices()[known(index)];
    std::lock_guard lock(device.mutex);
    for (auto& [id, queue] : device.queues)
      if (!queue->idle()) lasts.emplace_back(queue, queue->push_now([] {}, Pace::kAtOnce));
  }
  for (const auto& [queue, last] : lasts) queue->await(last);
}

bool drain_all(int64_t most_ms) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(most_ms);
  // Requires two idle passes: the last task of a queue may push to a queue that was checked before it.
  for (int idle = 0; idle < 2;) {
    idle = all_idle() ? idle + 1 : 0;
    if (idle > 0) continue;
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

void synchronize_stream(c10::Stream stream) {
  count(kStreamSyncs);
  if (!queue_of(stream).graph()) forbid_beside_captures("no thread may wait for a stream beside this capture");
  queue_of(stream).drain();
}

}  // namespace fake
