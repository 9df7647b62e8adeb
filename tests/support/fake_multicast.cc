// The multicast objects of fake drivers.

#include <sys/mman.h>
#include <sys/stat.h>

#include <cstdlib>

#include "support/fake_driver.h"

namespace nvx::test {
namespace {

/// The GPUs that joined an object, and the memory that they bound: of all drivers of this process. An object is known
/// by the inode of a descriptor that drivers pass each other.
struct Team {
  int devices = 0;
  size_t bytes = 0;
  std::set<int> joined;
  std::map<int, std::byte*> bound;
  bool is_whole() const { return int(joined.size()) == devices; }
};
std::mutex teams_mutex;
std::map<uint64_t, Team> teams;

}  // namespace

uint64_t team_of(int fd) {
  struct stat facts {};
  if (fstat(fd, &facts) != 0) return 0;
  const std::lock_guard lock(teams_mutex);
  return teams.count(facts.st_ino) ? facts.st_ino : 0;
}

DriverCode FakeDriver::multicast_granularity(int, ShareKind, int, size_t* bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "multicast_granularity")) return code;
  *bytes = multicast_granule_;
  return 0;
}

DriverCode FakeDriver::create_multicast(int device, ShareKind kind, int devices, size_t bytes, DeviceMemory* object) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "create_multicast")) return code;
  if (devices < 2 || bytes == 0 || bytes % kGranule) return kInvalid;
  Fd fd = new_memory(gpu_of(device), bytes);
  struct stat facts {};
  if (!fd || fstat(fd.get(), &facts) != 0) return kNoMemory;
  const std::lock_guard all(teams_mutex);
  teams[facts.st_ino] = {devices, bytes, {}, {}};
  *object = next_++;
  memories_[*object] = {std::move(fd), device, kind};
  return 0;
}

DriverCode FakeDriver::join_multicast(DeviceMemory object, int device) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "join_multicast")) return code;
  const auto it = memories_.find(object);
  const uint64_t team = it == memories_.end() ? 0 : team_of(it->second.fd.get());
  if (!team) return kBadHandle;
  const std::lock_guard all(teams_mutex);
  return teams[team].joined.insert(gpu_of(device)).second ? 0 : kInvalid;
}

/// Like the real driver, it does not return before all devices have joined.
DriverCode FakeDriver::bind_multicast(DeviceMemory object, int device, DeviceMemory memory, size_t offset,
                                      size_t bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "bind_multicast")) return code;
  const auto it = memories_.find(object), part = memories_.find(memory);
  if (it == memories_.end() || part == memories_.end() || part->second.owner != device) return kBadHandle;
  const uint64_t team = team_of(it->second.fd.get());
  const auto is_whole = [&] {
    const std::lock_guard all(teams_mutex);
    return teams[team].is_whole();
  };
  if (!team || offset % kGranule || bytes % kGranule || size_of(part->second.fd.get()) < offset + bytes)
    return kInvalid;
  if (!is_whole()) unblocking_.wait(lock, [&] { return unblocked_; });
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, part->second.fd.get(), off_t(offset));
  if (at == MAP_FAILED) return kNoMemory;
  const std::lock_guard all(teams_mutex);
  if (teams[team].bytes < bytes || !teams[team].bound.emplace(gpu_of(device), static_cast<std::byte*>(at)).second)
    std::abort();
  ++bound_;
  return 0;
}

DriverCode FakeDriver::unbind_multicast(DeviceMemory object, int device, size_t bytes) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "unbind_multicast");
  const uint64_t team = team_of(memories_.at(object).fd.get());
  const std::lock_guard all(teams_mutex);
  const auto part = teams[team].bound.extract(gpu_of(device));
  if (part.empty()) std::abort();
  munmap(part.mapped(), bytes);
  --bound_;
  return code;
}

std::vector<std::byte*> FakeDriver::multicast(const void* at) const {
  Lock lock(mutex_);
  const auto here = reinterpret_cast<DevicePtr>(at);
  const Range* range = find(here, 1);
  if (!range || !range->team || range->allowed.empty()) std::abort();
  const size_t offset = here - base_of(here);
  const std::lock_guard all(teams_mutex);
  const Team& team = teams[range->team];
  std::vector<std::byte*> parts;
  for (const auto& [gpu, part] : team.bound) parts.push_back(part + offset);
  if (int(parts.size()) != team.devices) std::abort();
  return parts;
}

}  // namespace nvx::test
