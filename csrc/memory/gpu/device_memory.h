#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/driver/device_driver.h"
#include "memory/gpu/pinned_memory.h"
#include "memory/shm/arena.h"

namespace nvx {

/// Throws Error with the driver's text on an error code: "nvx: <call> on GPU 1: <text>".
void check_driver(const DeviceDriver& driver, DriverCode code, const std::string& call, int device);

/// Logs an error code, for destructors, which cannot throw.
void log_failed_call(const DeviceDriver& driver, DriverCode code, const char* call);

/// Throws Error if the driver reports that one device cannot access the other's memory.
void check_peer_access(DeviceDriver& driver, int device, int peer);

/// Throws Error.
DeviceProperties properties_of(DeviceDriver& driver, int device);

/// A stack of steps that undo actions. The destructor runs them in reverse order.
class Undo {
 public:
  Undo() = default;
  ~Undo() { all(); }
  Undo(Undo&& other) noexcept : steps_(std::move(other.steps_)) { other.steps_.clear(); }

  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  /// Runs none of the steps and keeps what they own, because a hanging device may still use it.
  void forget();

 private:
  void all();
  std::vector<std::function<void()>> steps_;
};

/// Take ownership of physical memory, reserve addresses, and map memory there for a device. `undo` releases each, and
/// must not outlive the driver. `alignment`: a power of two; 0 for the driver's own. Throw Error.
void own_memory(DeviceDriver& driver, DeviceMemory memory, Undo& undo);
DevicePtr reserve(DeviceDriver& driver, int device, size_t bytes, Undo& undo, size_t alignment = 0);
void map(DeviceDriver& driver, int device, DevicePtr at, size_t bytes, DeviceMemory memory, Undo& undo);

/// Memory that a device can access, from any source. The destructor returns everything that it acquired.
class DeviceRegion {
 public:
  /// New memory that can be shared by this kind only. `bytes`: a multiple of share_granularity(). Throws Error.
  static std::unique_ptr<DeviceRegion> make(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                            size_t bytes);
  /// Another process's memory, mapped for this device. Throws Error if it is refused or smaller than `bytes`.
  static std::unique_ptr<DeviceRegion> import_fd(std::shared_ptr<DeviceDriver> driver, int device, int fd,
                                                 size_t bytes);
  static std::unique_ptr<DeviceRegion> import_handle(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                                     const HandleBytes& handle, size_t bytes);
  /// Host memory from a memfd of any process, pinned for this device. Throws Error.
  static std::unique_ptr<DeviceRegion> pin(std::shared_ptr<DeviceDriver> driver, int device, int memfd, size_t bytes);

  DevicePtr base() const { return base_; }
  size_t bytes() const { return bytes_; }
  /// Virtual memory as the driver has it; 0 for other kinds.
  DeviceMemory memory() const { return memory_; }
  ShareKind kind() const { return kind_; }
  int device() const { return device_; }
  /// The host address, if it is pinned host memory.
  std::byte* host() const { return host_; }

  /// Handles for another process: a descriptor of kFd, the bytes of kFabric and kIpc. Throws Error.
  Fd export_fd() const;
  HandleBytes export_handle() const;
  /// Lets another device of this process access it. Throws Error.
  void allow_access(int device) const;
  /// Keeps the memory until the process ends, because a hanging device may still use it.
  void abandon() {
    if (!abandoned_.exchange(true)) undo_.forget();  // several threads may notice one hang
  }
  bool abandoned() const { return abandoned_; }

 private:
  DeviceRegion(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes)
      : driver_(std::move(driver)), device_(device), kind_(kind), bytes_(bytes) {}
  void map_memory(DriverCode code, const char* call);
  void check_size() const;
  void check(DriverCode code, const std::string& call) const { check_driver(*driver_, code, call, device_); }

  std::shared_ptr<DeviceDriver> driver_;
  int device_;
  ShareKind kind_;
  size_t bytes_;
  DeviceMemory memory_ = 0;
  DevicePtr base_ = 0;
  std::byte* host_ = nullptr;
  Undo undo_;
  std::atomic<bool> abandoned_{false};
};

/// The granularity of sizes of this kind. Throws Error.
size_t share_granularity(DeviceDriver& driver, int device, ShareKind kind);

/// The kinds that this process can export and import, by a small trial. kPointer: the device works at all.
struct ShareProbe {
  uint32_t kinds = 0;                     ///< a bit per kind
  uint32_t hung = 0;                      ///< the kinds for which the driver did not return
  std::string why_not[kShareKinds] = {};  ///< for the kinds that are not in `kinds`
  DeviceProperties properties;
  bool has(ShareKind kind) const { return kinds >> int(kind) & 1; }
};
struct ProbeTimes {
  std::chrono::milliseconds device{20'000};  ///< for the first call, which creates the device's context
  std::chrono::milliseconds kind{2000};      ///< for each kind
};
/// Returns in time even if the driver hangs. Does not try kinds again that have hung before.
ShareProbe probe_share_kinds(const std::shared_ptr<PinnedMemory>& pinned, int device, const ProbeTimes& times = {},
                             const ShareProbe& before = ShareProbe());

/// A memory for DeviceRegion::pin(). Throws Error.
inline Fd make_host_fallback(size_t bytes) { return sealed_memory("nvx-host-fallback", bytes); }

/// Mapped memory of other processes. The destructor unmaps it on a thread, because the driver may hang in that too.
class MappedRegions {
 public:
  /// `timeout`: how long the destructor waits for that thread.
  explicit MappedRegions(std::chrono::milliseconds timeout) : timeout_(timeout) {}
  ~MappedRegions();
  MappedRegions(const MappedRegions&) = delete;

  void add(std::shared_ptr<DeviceRegion> region) { regions_.push_back(std::move(region)); }

 private:
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<DeviceRegion>> regions_;
};

}  // namespace nvx
