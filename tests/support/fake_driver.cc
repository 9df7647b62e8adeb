#include "support/fake_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>

#include "base/round_up.h"

namespace nvx::test {
namespace {

constexpr DriverCode kNotAllowed = 217, kIllegalAddress = 700;

void* pointer(DevicePtr at) { return reinterpret_cast<void*>(at); }
DevicePtr address(void* memory) { return reinterpret_cast<DevicePtr>(memory); }

}  // namespace

size_t size_of(int fd) {
  struct stat facts {};
  return fstat(fd, &facts) == 0 ? size_t(facts.st_size) : 0;
}

Fd new_memory(int gpu, size_t bytes) {
  const std::string name = "gpu" + std::to_string(gpu);
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!fd || ftruncate(fd.get(), off_t(bytes)) != 0) return {};
  return fd;
}

namespace {

/// The GPU that owns the memory of this descriptor; -1: none.
int owner_of(int fd) {
  char name[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (readlink(link.c_str(), name, sizeof name - 1) < 0) return -1;
  const char* digits = std::strstr(name, "memfd:gpu");
  return digits ? std::atoi(digits + std::strlen("memfd:gpu")) : -1;
}

void* map_anywhere(int fd, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

/// The content of a handle that other processes can open.
struct Ticket {
  uint64_t magic = 0x7469636b6574;
  int64_t pid = 0;
  int64_t fd = 0;
  const void* maker = nullptr;
};

HandleBytes ticket_for(int fd, const void* maker) {
  const Ticket ticket{Ticket().magic, getpid(), fd, maker};
  HandleBytes handle{};
  std::memcpy(handle.data(), &ticket, sizeof ticket);
  return handle;
}

Fd redeem(const HandleBytes& handle, const void* not_by) {
  Ticket ticket;
  std::memcpy(&ticket, handle.data(), sizeof ticket);
  if (ticket.magic != Ticket().magic || (ticket.pid == getpid() && ticket.maker == not_by)) return {};
  const std::string path = "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.fd);
  return Fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

}  // namespace

void FakeDriver::set_architecture(int architecture, int cuda) {
  const Lock lock(mutex_);
  architecture_ = architecture, cuda_ = cuda;
}

void FakeDriver::pair(int from, int to, PeerAccess access) {
  Lock lock(mutex_);
  accesses_[{from, to}] = access;
}

void FakeDriver::lacks(ShareKind kind) {
  Lock lock(mutex_);
  lacking_.insert(kind);
}

void FakeDriver::refuse(const std::string& call, DriverCode code) {
  Lock lock(mutex_);
  if (code) {
    refused_[call] = code;
  } else {
    refused_.erase(call);
  }
}

void FakeDriver::fail_call(int n) {
  Lock lock(mutex_);
  fails_at_ = n < 0 ? -1 : calls_ + n;
}

void FakeDriver::block(const std::string& call) {
  Lock lock(mutex_);
  blocked_.insert(call);
}

void FakeDriver::block_call(int n) {
  Lock lock(mutex_);
  blocks_at_ = n < 0 ? -1 : calls_ + n;
}

std::string FakeDriver::faulted_call() const {
  Lock lock(mutex_);
  return faulted_call_;
}

int FakeDriver::calls() const {
  Lock lock(mutex_);
  return calls_;
}

int FakeDriver::calls_of(const std::string& call) const {
  Lock lock(mutex_);
  const auto it = counts_.find(call);
  return it == counts_.end() ? 0 : it->second;
}

std::string FakeDriver::unreleased() const {
  Lock lock(mutex_);
  std::string open;
  const auto list = [&](const char* what, size_t count) {
    if (count) open += std::to_string(count) + " " + what + " ";
  };
  list("memories", memories_.size());
  list("reservations", reserved_.size());
  constexpr const char* kHow[] = {"mappings", "allocations", "opened handles", "pinned ranges"};
  for (int how = 0; how < 4; ++how) {
    size_t count = 0;
    for (const auto& [at, range] : ranges_) count += int(range.how) == how;
    list(kHow[how], count);
  }
  list("streams", streams_.size());
  list("bound parts", size_t(bound_));
  return open;
}

void FakeDriver::unblock() {
  Lock lock(mutex_);
  unblocked_ = true;
  for (auto& [number, stream] : streams_) stream.busy.clear();
  unblocking_.notify_all();
}

DriverCode FakeDriver::enter(Lock& lock, const char* call) {
  ++counts_[call];
  const int n = calls_++;
  if (n == fails_at_ || n == blocks_at_) faulted_call_ = call;
  if (n == blocks_at_ || blocked_.count(call)) unblocking_.wait(lock, [&] { return unblocked_; });
  if (n == fails_at_) return 999;
  const auto it = refused_.find(call);
  return it == refused_.end() ? 0 : it->second;
}

FakeDriver::PeerAccess FakeDriver::access_of(int device, const void* at) const {
  Lock lock(mutex_);
  const Range* range = find(reinterpret_cast<DevicePtr>(at), 1);
  return !range || range->how == Range::How::kPinned ? PeerAccess::kWorks : access(device, range->owner);
}

bool FakeDriver::has_odd_kernels() const {
  Lock lock(mutex_);
  return std::any_of(accesses_.begin(), accesses_.end(),
                     [](const auto& t) { return t.second >= PeerAccess::kLosesKernelStores; });
}

void FakeDriver::run(const std::shared_ptr<FakeDriver>& self, DeviceStream stream, std::function<void()> kernel) {
  {
    Lock lock(mutex_);
    streams_.at(stream).kernels.push_back(std::move(kernel));
    if (streams_.at(stream).kernels.size() > 1) return;  // the thread of the first runs it
  }
  std::thread([self, stream] {
    for (Lock lock(self->mutex_); !self->streams_.at(stream).kernels.empty();) {
      const std::function<void()> kernel = self->streams_.at(stream).kernels.front();
      lock.unlock();
      kernel();
      lock.lock();
      self->streams_.at(stream).kernels.pop_front();
    }
  }).detach();
}

/// Memory that a device may still write must not be returned: its next owner would see the writes.
void FakeDriver::demand_idle(DevicePtr at) const {
  for (const auto& [number, stream] : streams_) {
    if (stream.busy.count(at)) std::abort();
  }
}

FakeDriver::PeerAccess FakeDriver::access(int from, int to) const {
  const auto it = accesses_.find({from, to});
  return from == to || it == accesses_.end() ? PeerAccess::kWorks : it->second;
}

const FakeDriver::Range* FakeDriver::find(DevicePtr at, size_t bytes) const {
  auto it = ranges_.upper_bound(at);
  if (it == ranges_.begin()) return nullptr;
  --it;
  return at + bytes <= it->first + it->second.bytes ? &it->second : nullptr;
}

DevicePtr FakeDriver::base_of(DevicePtr at) const { return std::prev(ranges_.upper_bound(at))->first; }

bool FakeDriver::may(int device, const Range& range) const {
  switch (range.how) {
    case Range::How::kPinned: return true;
    case Range::How::kAllocated: return range.owner == device || enabled_.count({device, range.owner});
    default: return range.allowed.count(device) != 0;
  }
}

int FakeDriver::device_of(int gpu) const {
  if (gpus_.empty()) return gpu;
  const auto at = std::find(gpus_.begin(), gpus_.end(), gpu);
  return at == gpus_.end() ? -1 : int(at - gpus_.begin());
}

std::string FakeDriver::error_text(DriverCode code) const { return "fake refusal " + std::to_string(code); }

DriverCode FakeDriver::count(int* devices) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "count")) return code;
  *devices = devices_;
  return 0;
}

DriverCode FakeDriver::describe(int device, DeviceProperties* properties) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "describe")) return code;
  if (device < 0 || device >= devices_) return 101;
  properties->uuid.fill(uint8_t(gpu_of(device) + 1));
  properties->name = "Fake GPU";
  char bus[24];
  std::snprintf(bus, sizeof bus, "0000:%02x:00.0", gpu_of(device) + 1);
  properties->bus = bus;
  properties->bytes = size_t(1) << 30;
  for (int kind = 0; kind < kShareKinds; ++kind) properties->can[kind] = !lacking_.count(ShareKind(kind));
  properties->exports_dma_buf = device % 2 == 0;
  properties->orders_rdma = !refused_.count("orders_rdma");
  properties->architecture = architecture_, properties->cuda = cuda_;
  return 0;
}

DriverCode FakeDriver::granularity(int, ShareKind, size_t* bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "granularity")) return code;
  *bytes = kGranule;
  return 0;
}

DriverCode FakeDriver::create(int device, ShareKind kind, size_t bytes, DeviceMemory* memory) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "create")) return code;
  if (bytes == 0 || bytes % kGranule) return kInvalid;
  if (lacking_.count(kind)) return 801;
  Fd fd = new_memory(gpu_of(device), bytes);
  if (!fd) return kNoMemory;
  *memory = next_++;
  memories_[*memory] = {std::move(fd), device, kind};
  return 0;
}

DriverCode FakeDriver::release(DeviceMemory memory) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "release");
  if (!memories_.erase(memory)) std::abort();  // returned twice
  return code;
}

/// Without an alignment, addresses are multiples of the granule of memory and of nothing larger.
DriverCode FakeDriver::reserve(size_t bytes, size_t alignment, DevicePtr* at) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "reserve")) return code;
  const size_t multiple = alignment ? alignment : 2 * kGranule, room = bytes + 2 * multiple;
  void* memory = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kNoMemory;
  const DevicePtr begin = address(memory);
  *at = round_up(begin + 1, multiple) + (alignment ? 0 : kGranule);
  munmap(memory, *at - begin);
  munmap(pointer(*at + bytes), begin + room - *at - bytes);
  reserved_[*at] = bytes;
  return 0;
}

DriverCode FakeDriver::unreserve(DevicePtr at, size_t bytes) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "unreserve");
  const auto inside = ranges_.lower_bound(at);
  const bool mapped = inside != ranges_.end() && inside->first < at + bytes;
  if (!reserved_.count(at) || reserved_[at] != bytes || mapped) std::abort();
  reserved_.erase(at);
  munmap(pointer(at), bytes);
  return code;
}

bool FakeDriver::is_reserved(DevicePtr at, size_t bytes) const {
  const auto after = reserved_.upper_bound(at);
  if (after == reserved_.begin()) return false;
  const auto& [begin, room] = *std::prev(after);
  return at - begin <= room && bytes <= room - (at - begin);
}

DriverCode FakeDriver::map(DevicePtr at, size_t bytes, DeviceMemory memory) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "map")) return code;
  const auto it = memories_.find(memory);
  if (it == memories_.end() || !is_reserved(at, bytes) || size_of(it->second.fd.get()) < bytes) return kInvalid;
  const uint64_t team = team_of(it->second.fd.get());
  if (team && at % multicast_granule_) return kInvalid;
  const auto next = ranges_.lower_bound(at);
  if (find(at, 1) || (next != ranges_.end() && next->first < at + bytes)) return kInvalid;  // the range is occupied
  if (mmap(pointer(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, it->second.fd.get(), 0) == MAP_FAILED)
    return kNoMemory;
  ranges_[at] = {Range::How::kMapped, bytes, it->second.owner, {}, Fd(), team};
  return 0;
}

DriverCode FakeDriver::unmap(DevicePtr at, size_t bytes) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "unmap");
  demand_idle(at);
  if (!ranges_.erase(at)) std::abort();
  mmap(pointer(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return code;
}

DriverCode FakeDriver::allow(int, DevicePtr at, size_t, int device) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "allow")) return code;
  const auto it = ranges_.find(at);
  if (it == ranges_.end()) return kInvalid;
  if (!it->second.team && access(device, it->second.owner) == PeerAccess::kRefuses) return kNotAllowed;
  it->second.allowed.insert(device);
  return 0;
}

DriverCode FakeDriver::export_fd(DeviceMemory memory, Fd* fd) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "export_fd")) return code;
  const auto it = memories_.find(memory);
  if (it == memories_.end() || it->second.kind != ShareKind::kFd) return kBadHandle;
  *fd = Fd(fcntl(it->second.fd.get(), F_DUPFD_CLOEXEC, 0));
  return *fd ? 0 : kNoMemory;
}

DriverCode FakeDriver::export_fabric(DeviceMemory memory, HandleBytes* handle) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "export_fabric")) return code;
  const auto it = memories_.find(memory);
  if (it == memories_.end() || it->second.kind != ShareKind::kFabric) return kBadHandle;
  *handle = ticket_for(it->second.fd.get(), this);
  return 0;
}

DriverCode FakeDriver::take(Fd fd, DeviceMemory* memory) {
  const int owner = fd ? device_of(owner_of(fd.get())) : -1;
  if (owner < 0) return kBadHandle;
  *memory = next_++;
  memories_[*memory] = {std::move(fd), owner, ShareKind::kPointer};
  return 0;
}

DriverCode FakeDriver::import_fd(int, int fd, DeviceMemory* memory) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "import_fd")) return code;
  return take(Fd(fcntl(fd, F_DUPFD_CLOEXEC, 0)), memory);
}

DriverCode FakeDriver::import_fabric(int, const HandleBytes& handle, DeviceMemory* memory) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "import_fabric")) return code;
  return take(redeem(handle, nullptr), memory);
}

DriverCode FakeDriver::allocate(int device, size_t bytes, DevicePtr* at) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "allocate")) return code;
  Fd fd = new_memory(gpu_of(device), bytes);
  void* memory = fd ? map_anywhere(fd.get(), bytes) : nullptr;
  if (!memory) return kNoMemory;
  *at = address(memory);
  ranges_[*at] = {Range::How::kAllocated, bytes, device, {}, std::move(fd)};
  return 0;
}

DriverCode FakeDriver::close(DevicePtr at, Range::How how) {
  const auto it = ranges_.find(at);
  demand_idle(at);
  if (it == ranges_.end() || it->second.how != how) std::abort();
  munmap(pointer(at), it->second.bytes);
  ranges_.erase(it);
  return 0;
}

DriverCode FakeDriver::free(int, DevicePtr at) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "free");
  close(at, Range::How::kAllocated);
  return code;
}

DriverCode FakeDriver::export_ipc(int, DevicePtr at, HandleBytes* handle) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "export_ipc")) return code;
  const auto it = ranges_.find(at);
  if (it == ranges_.end() || it->second.how != Range::How::kAllocated) return kInvalid;
  *handle = ticket_for(it->second.fd.get(), this);
  return 0;
}

/// Like the real driver, which does not let the exporter open its own handle.
DriverCode FakeDriver::open_ipc(int device, const HandleBytes& handle, DevicePtr* at) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "open_ipc")) return code;
  Fd fd = redeem(handle, this);
  const int owner = fd ? device_of(owner_of(fd.get())) : -1;
  if (owner < 0) return kBadHandle;
  if (access(device, owner) == PeerAccess::kRefuses) return kNotAllowed;
  const size_t bytes = size_of(fd.get());
  void* memory = map_anywhere(fd.get(), bytes);
  if (!memory) return kNoMemory;
  *at = address(memory);
  ranges_[*at] = {Range::How::kOpened, bytes, owner, {device}, std::move(fd)};
  return 0;
}

DriverCode FakeDriver::close_ipc(int, DevicePtr at) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "close_ipc");
  close(at, Range::How::kOpened);
  return code;
}

DriverCode FakeDriver::range(int, DevicePtr at, DevicePtr* begin, size_t* bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "range")) return code;
  auto it = ranges_.upper_bound(at);
  if (it == ranges_.begin()) return kInvalid;
  --it;
  if (at - it->first >= it->second.bytes) return kInvalid;
  *begin = it->first;
  *bytes = it->second.bytes;
  return 0;
}

DriverCode FakeDriver::can_reach(int device, int peer, bool* can) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "can_reach")) return code;
  *can = access(device, peer) != PeerAccess::kRefuses;
  return 0;
}

DriverCode FakeDriver::enable_peer(int device, int peer) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "enable_peer")) return code;
  if (access(device, peer) == PeerAccess::kRefuses) return kNotAllowed;
  enabled_.insert({device, peer});
  return 0;
}

DriverCode FakeDriver::pin(int, void* memory, size_t bytes, DevicePtr* at) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "pin")) return code;
  *at = address(memory);
  ranges_[*at] = {Range::How::kPinned, bytes, -1, {}, Fd()};
  return 0;
}

DriverCode FakeDriver::unpin(int, void* memory) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "unpin");
  demand_idle(address(memory));
  if (!ranges_.erase(address(memory))) std::abort();
  return code;
}

DriverCode FakeDriver::create_stream(int device, DeviceStream* stream) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "create_stream")) return code;
  *stream = next_++;
  streams_[*stream].device = device;
  return 0;
}

DriverCode FakeDriver::destroy_stream(int, DeviceStream stream) {
  Lock lock(mutex_);
  const DriverCode code = enter(lock, "destroy_stream");
  if (!streams_.count(stream) || !streams_[stream].busy.empty() || !streams_[stream].kernels.empty()) std::abort();
  streams_.erase(stream);
  return code;
}

namespace {

template <class Word>
bool copy_as(void* to, void* from, size_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % sizeof(Word) != 0) return false;
  for (size_t i = 0; i < bytes / sizeof(Word); ++i) {
    const Word word = std::atomic_ref(static_cast<Word*>(from)[i]).load(std::memory_order_relaxed);
    std::atomic_ref(static_cast<Word*>(to)[i]).store(word, std::memory_order_relaxed);
  }
  return true;
}

/// Kernels may read words while a copy changes them, as on a device.
void copy_words(void* to, void* from, size_t bytes) {
  if (!copy_as<uint64_t>(to, from, bytes) && !copy_as<uint32_t>(to, from, bytes)) std::memcpy(to, from, bytes);
}

}  // namespace

DriverCode FakeDriver::copy(int device, DeviceStream stream, DevicePtr to, DevicePtr from, size_t bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "copy")) return code;
  const Range *target = find(to, bytes), *source = find(from, bytes);
  if (!streams_.count(stream) || !target || !source) return kInvalid;
  if (!may(device, *target) || !may(device, *source)) return kIllegalAddress;
  PeerAccess worst = PeerAccess::kWorks;
  for (const Range* range : {target, source}) {
    if (range->how == Range::How::kPinned) continue;
    if (const PeerAccess t = access(device, range->owner); t != PeerAccess::kWorks) worst = t;
  }
  const bool writes = target->how != Range::How::kPinned && target->owner != device;
  if (worst == PeerAccess::kBlocks) unblocking_.wait(lock, [&] { return unblocked_; });
  if (worst == PeerAccess::kSlow) std::this_thread::sleep_for(std::chrono::milliseconds(3));
  if (worst == PeerAccess::kHangs) streams_[stream].hangs = true;
  if (!unblocked_) streams_[stream].busy.insert({base_of(to), base_of(from)});
  if (streams_[stream].hangs && !unblocked_) return 0;
  copy_words(pointer(to), pointer(from), bytes);
  if (worst == PeerAccess::kCorrupts || (worst == PeerAccess::kCorruptsWrites && writes))
    static_cast<uint8_t*>(pointer(to))[bytes / 2] ^= 0x10;
  return 0;
}

DriverCode FakeDriver::fill(int device, DeviceStream stream, DevicePtr to, uint8_t value, size_t bytes) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "fill")) return code;
  const Range* target = find(to, bytes);
  if (!streams_.count(stream) || !target) return kInvalid;
  if (!may(device, *target)) return kIllegalAddress;
  if (!unblocked_) streams_[stream].busy.insert(base_of(to));
  std::memset(pointer(to), value, bytes);
  return 0;
}

DriverCode FakeDriver::drained(int, DeviceStream stream, bool* done) {
  Lock lock(mutex_);
  if (const DriverCode code = enter(lock, "drained")) return code;
  *done = (unblocked_ || !streams_.at(stream).hangs) && streams_.at(stream).kernels.empty();
  if (*done) streams_.at(stream).busy.clear();
  return 0;
}

}  // namespace nvx::test
