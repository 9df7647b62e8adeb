#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "memory/driver/device_driver.h"

namespace nvx::test {

constexpr DriverCode kInvalid = 1, kNoMemory = 2, kBadHandle = 400;

/// The size of a file; 0 if it cannot be known.
size_t size_of(int fd);

/// A fake driver with several GPUs. Each allocation is a memfd, so that it can be passed between processes like a
/// device's; an address is one of this process. The driver tracks all resources. It aborts if one is returned twice, or
/// while unfinished work may access it.
class FakeDriver : public DeviceDriver {
 public:
  static constexpr size_t kGranule = 2 << 20;

  /// The outcome of one device using the memory of another, independent of what the driver reports.
  enum class PeerAccess {
    kWorks,
    kRefuses,   ///< access cannot be granted
    kHangs,     ///< copies begin and never end
    kBlocks,    ///< the call that begins a copy never returns
    kCorrupts,  ///< one bit of the data changes
    kCorruptsWrites,
    kSlow,  ///< a copy takes some milliseconds longer
    // Copies work, but stores of kernels there ...
    kLosesKernelStores,  ///< do not arrive
    kLosesFlags,         ///< arrive as packets, but not as flags
    kCorruptsPackets,    ///< arrive, but with one bit of each packet's data changed
  };

  explicit FakeDriver(int devices) : devices_(devices) {}
  /// Sets which GPUs its devices are, like CUDA_VISIBLE_DEVICES. Call it before anything else. By default device i is
  /// GPU i.
  void set_visible(std::vector<int> gpus) { gpus_ = std::move(gpus); }

  /// Its devices have this architecture, and it serves this CUDA, as in DeviceProperties.
  void set_architecture(int architecture, int cuda);
  void pair(int from, int to, PeerAccess access);
  void pairs(int a, int b, PeerAccess access) { pair(a, b, access), pair(b, a, access); }
  /// The driver reports this as unsupported.
  void lacks(ShareKind kind);
  /// Sizes and addresses of multicast objects are multiples of this power of two.
  void set_multicast_granule(size_t bytes) { multicast_granule_ = bytes; }
  /// Every call of this name fails with this code.
  void refuse(const std::string& call, DriverCode code);
  /// The n-th call from now on fails, whatever it is; a call that returns a resource returns it nevertheless.
  void fail_call(int n);
  /// The n-th call from now on does not return until unblock().
  void block_call(int n);
  /// No call of this name returns until unblock().
  void block(const std::string& call);
  /// The call that fail_call() or block_call() affected; empty: none yet.
  std::string faulted_call() const;
  int calls() const;
  /// The resources that were not returned; empty if there are none.
  std::string unreleased() const;
  /// How often a call was made.
  int calls_of(const std::string& call) const;
  /// Lets blocked calls return and hanging streams drain.
  void unblock();
  /// The effect on a kernel's stores there: that of the pair, if the address is another device's.
  PeerAccess access_of(int device, const void* at) const;
  /// Whether there is a pair for which kernels' stores behave differently from copies.
  bool has_odd_kernels() const;
  /// The bytes of all devices that a kernel reaches at an address of a multicast object, by GPU. It aborts if they are
  /// not bound, or if the object is not mapped there.
  std::vector<std::byte*> multicast(const void* at) const;
  /// Runs a kernel that was launched on a stream, on a thread of its own.
  void run(const std::shared_ptr<FakeDriver>& self, DeviceStream stream, std::function<void()> kernel);

  std::string error_text(DriverCode code) const override;
  DriverCode count(int* devices) override;
  DriverCode describe(int device, DeviceProperties* properties) override;
  DriverCode granularity(int device, ShareKind kind, size_t* bytes) override;
  DriverCode create(int device, ShareKind kind, size_t bytes, DeviceMemory* memory) override;
  DriverCode release(DeviceMemory memory) override;
  DriverCode reserve(size_t bytes, size_t alignment, DevicePtr* at) override;
  DriverCode unreserve(DevicePtr at, size_t bytes) override;
  DriverCode map(DevicePtr at, size_t bytes, DeviceMemory memory) override;
  DriverCode unmap(DevicePtr at, size_t bytes) override;
  DriverCode allow(int owner, DevicePtr at, size_t bytes, int device) override;
  DriverCode export_fd(DeviceMemory memory, Fd* fd) override;
  DriverCode export_fabric(DeviceMemory memory, HandleBytes* handle) override;
  DriverCode import_fd(int device, int fd, DeviceMemory* memory) override;
  DriverCode import_fabric(int device, const HandleBytes& handle, DeviceMemory* memory) override;
  DriverCode multicast_granularity(int device, ShareKind kind, int devices, size_t* bytes) override;
  DriverCode create_multicast(int device, ShareKind kind, int devices, size_t bytes, DeviceMemory* object) override;
  DriverCode join_multicast(DeviceMemory object, int device) override;
  DriverCode bind_multicast(DeviceMemory object, int device, DeviceMemory memory, size_t offset, size_t bytes) override;
  DriverCode unbind_multicast(DeviceMemory object, int device, size_t bytes) override;
  DriverCode allocate(int device, size_t bytes, DevicePtr* at) override;
  DriverCode free(int device, DevicePtr at) override;
  DriverCode export_ipc(int device, DevicePtr at, HandleBytes* handle) override;
  DriverCode open_ipc(int device, const HandleBytes& handle, DevicePtr* at) override;
  DriverCode close_ipc(int device, DevicePtr at) override;
  DriverCode range(int device, DevicePtr at, DevicePtr* begin, size_t* bytes) override;
  DriverCode can_reach(int device, int peer, bool* can) override;
  DriverCode enable_peer(int device, int peer) override;
  DriverCode pin(int device, void* memory, size_t bytes, DevicePtr* at) override;
  DriverCode unpin(int device, void* memory) override;
  DriverCode create_stream(int device, DeviceStream* stream) override;
  DriverCode destroy_stream(int device, DeviceStream stream) override;
  DriverCode copy(int device, DeviceStream stream, DevicePtr to, DevicePtr from, size_t bytes) override;
  DriverCode fill(int device, DeviceStream stream, DevicePtr to, uint8_t value, size_t bytes) override;
  DriverCode drained(int device, DeviceStream stream, bool* done) override;

 private:
  struct Memory {
    Fd fd;
    int owner = 0;
    ShareKind kind = ShareKind::kPointer;
  };
  /// Valid addresses.
  struct Range {
    enum class How { kMapped, kAllocated, kOpened, kPinned } how;
    size_t bytes = 0;
    int owner = 0;
    std::set<int> allowed;
    Fd fd;
    uint64_t team = 0;  ///< of a multicast object
  };

  using Lock = std::unique_lock<std::mutex>;

  DriverCode enter(Lock& lock, const char* call);
  void demand_idle(DevicePtr at) const;
  DevicePtr base_of(DevicePtr at) const;
  PeerAccess access(int from, int to) const;
  const Range* find(DevicePtr at, size_t bytes) const;
  bool is_reserved(DevicePtr at, size_t bytes) const;
  bool may(int device, const Range& range) const;
  DriverCode take(Fd fd, DeviceMemory* memory);
  DriverCode close(DevicePtr at, Range::How how);

  int gpu_of(int device) const { return gpus_.empty() ? device : gpus_.at(size_t(device)); }
  int device_of(int gpu) const;

  const int devices_;
  std::vector<int> gpus_;
  int architecture_ = 90, cuda_ = 13000;
  size_t multicast_granule_ = kGranule;
  mutable std::mutex mutex_;
  std::condition_variable unblocking_;
  std::map<std::pair<int, int>, PeerAccess> accesses_;
  std::set<ShareKind> lacking_;
  std::map<std::string, DriverCode> refused_;
  std::map<std::string, int> counts_;
  std::set<std::pair<int, int>> enabled_;
  int calls_ = 0;
  int fails_at_ = -1;
  int blocks_at_ = -1;
  std::set<std::string> blocked_;
  std::string faulted_call_;
  bool unblocked_ = false;
  uint64_t next_ = 1;
  int bound_ = 0;  // parts of multicast objects
  std::map<DeviceMemory, Memory> memories_;
  std::map<DevicePtr, size_t> reserved_;
  std::map<DevicePtr, Range> ranges_;
  struct Stream {
    int device = 0;
    bool hangs = false;
    std::deque<std::function<void()>> kernels;  // that have not ended, in order
    std::set<DevicePtr> busy;                   // accessed by work that was begun and is not known to have ended
  };
  std::map<DeviceStream, Stream> streams_;
};

/// Memory of a GPU, and the multicast object of a descriptor; 0: none. For the parts of the driver alone.
Fd new_memory(int gpu, size_t bytes);
uint64_t team_of(int fd);

}  // namespace nvx::test
