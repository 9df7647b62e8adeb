#include "torch/streams/pooled_event.h"

#include <unordered_map>
#include <vector>

#include "base/mutex.h"

namespace nvx {
namespace {

class EventPool {
 public:
  static EventPool& of(bool timed) {
    static auto* const kPools = new EventPool[2];  // never destroyed: works may outlive static destructors
    return kPools[timed];
  }
  std::optional<c10::Event> take(const c10::Device& device) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::vector<c10::Event>& free = free_[device];
    if (free.empty()) return std::nullopt;
    std::optional<c10::Event> event(std::move(free.back()));
    free.pop_back();
    return event;
  }
  void give_back(c10::Event event) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    free_[event.device()].push_back(std::move(event));
  }

 private:
  Mutex mutex_;
  std::unordered_map<c10::Device, std::vector<c10::Event>> free_ GUARDED_BY(mutex_);
};

}  // namespace

PooledEvent::~PooledEvent() {
  if (event_) EventPool::of(timed_).give_back(std::move(*event_));
}

void PooledEvent::record(const c10::Stream& stream) {
  const c10::OptionalDeviceGuard on(stream.device());
  if (event_) return event_->record(stream);
  auto event = EventPool::of(timed_).take(stream.device());
  if (!event)
    event.emplace(stream.device_type(), timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  event->record(stream);
  event_.emplace(std::move(*event));  // only now: an event that was not recorded blocks no stream
}

}  // namespace nvx
