#include "torch/streams/shared_streams.h"

#include <map>

#include "torch/core/argument_error.h"

namespace nvx {

Mutex& SharedStreams::registry_mutex() {
  static auto* const kMutex = new Mutex;
  return *kMutex;
}

std::shared_ptr<SharedStreams> SharedStreams::join(uint64_t group) {
  static auto* const kGroups = new std::map<uint64_t, std::weak_ptr<SharedStreams>>;
  MutexLock lock(registry_mutex());
  std::erase_if(*kGroups, [](const auto& entry) { return entry.second.expired(); });
  auto& known = (*kGroups)[group];
  auto streams = known.lock();
  if (!streams) known = streams = std::make_shared<SharedStreams>();
  streams->ranks_.fetch_add(1, std::memory_order_acq_rel);
  return streams;
}

void SharedStreams::check(const Call& call, const std::string& group) {
  if (is_alone()) return;
  MutexLock lock(mutex_);
  compare(call, group);
}

void SharedStreams::note(const Call& call) {
  if (is_alone()) return;
  MutexLock lock(mutex_);
  keep(call);
}

SharedStreams::Claim SharedStreams::claim(const Call& call, const std::string& group) {
  if (is_alone()) return {};
  MutexLock lock(mutex_);
  compare(call, group);
  const Numbered before = last_[call.stream];
  keep(call);
  return {this, call, before};
}

/// Does nothing if another call has used the stream meanwhile.
void SharedStreams::release(const c10::Stream& stream, const Numbered& mine, const Numbered& before) {
  MutexLock lock(mutex_);
  if (Numbered& last = last_[stream]; last == mine) last = before;
}

void SharedStreams::compare(const Call& call, const std::string& group) {
  const auto known = last_.find(call.stream);
  if (known == last_.end()) return;
  const Numbered& last = known->second;
  if (last.rank == call.it.rank || last.number < call.it.number) return;  // numbers begin with 1
  throw_argument_error("nvx: group ", group, ": collective #", call.it.number, " of rank ", call.it.rank,
                       " would begin behind #", last.number, " of rank ", last.rank,
                       ", a thread of the same process, on one stream, where neither could end. Next: give each rank a "
                       "stream of its own (with torch.Stream(device): ...)");
}

void SharedStreams::keep(const Call& call) {
  if (Numbered& last = last_[call.stream]; last.number <= call.it.number) last = call.it;
}

}  // namespace nvx
