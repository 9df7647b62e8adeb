#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/driver/device_driver.h"

namespace nvx {

/// Throws Error with the driver's words if it refused: "nvx: <call> on GPU 1: <words>".
void demand(const DeviceDriver& driver, DriverCode code, const std::string& call, int device);

/// Logs a refusal, for destructors: nobody can be told there.
void note_refusal(const DeviceDriver& driver, DriverCode code, const char* call);

/// Throws Error if the driver says of itself that one device cannot reach the other's memory.
void demand_reach(DeviceDriver& driver, int device, int peer);

/// Steps that undo what was done. Its destructor takes them, the last first.
class Undo {
 public:
  Undo() = default;
  ~Undo() { all(); }
  Undo(Undo&& other) noexcept : steps_(std::move(other.steps_)) { other.steps_.clear(); }
  Undo& operator=(Undo&&) = delete;

  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  /// Leaves everything as it is: a device that hangs may still be using it.
  void forget();

 private:
  void all();
  std::vector<std::function<void()>> steps_;
};

/// Memory that a device can use, whoever made it. Its destructor gives back all that it took.
class DeviceRegion {
 public:
  /// New memory of this device, to be shared by this kind only. bytes: a multiple of share_granularity(). Throws Error.
  static std::unique_ptr<DeviceRegion> make(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                            size_t bytes);
  /// Memory that another process has made, for this device. Throws Error where the driver refuses, or where it is
  /// smaller than bytes.
  static std::unique_ptr<DeviceRegion> import_fd(std::shared_ptr<DeviceDriver> driver, int device, int fd,
                                                 size_t bytes);
  static std::unique_ptr<DeviceRegion> import_handle(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                                     const HandleBytes& handle, size_t bytes);
  /// Host memory out of a memfd, whoever made that, pinned for this device. Throws Error.
  static std::unique_ptr<DeviceRegion> pin(std::shared_ptr<DeviceDriver> driver, int device, int memfd, size_t bytes);

  DevicePtr base() const { return base_; }
  size_t bytes() const { return bytes_; }
  ShareKind kind() const { return kind_; }
  int device() const { return device_; }
  /// Where the processor sees it, if it is pinned host memory.
  std::byte* host() const { return host_; }

  /// For another process: a descriptor of kFd, the bytes of kFabric and kIpc. Throws Error.
  Fd export_fd() const;
  HandleBytes export_handle() const;
  /// Lets another device of this process use it. Throws Error.
  void open_to(int device) const;
  /// For memory that a hanging device may still be using: it stays until the process ends.
  void abandon() { undo_.forget(); }

 private:
  DeviceRegion(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes)
      : driver_(std::move(driver)), device_(device), kind_(kind), bytes_(bytes) {}
  void give_address(DeviceMemory memory);
  void demand_room() const;
  void demand_done(DriverCode code, const std::string& call) const { demand(*driver_, code, call, device_); }

  std::shared_ptr<DeviceDriver> driver_;
  int device_;
  ShareKind kind_;
  size_t bytes_;
  DeviceMemory memory_ = 0;
  DevicePtr base_ = 0;
  std::byte* host_ = nullptr;
  Undo undo_;
};

/// What sizes of this kind must be multiples of. Throws Error.
size_t share_granularity(DeviceDriver& driver, int device, ShareKind kind);

/// What this process can export and import again, found out by doing so with a small allocation. kPointer says that the
/// device works at all.
struct ShareProbe {
  uint32_t kinds = 0;                     ///< a bit a kind
  uint32_t hung = 0;                      ///< those that the driver did not return from
  std::string why_not[kShareKinds] = {};  ///< of those that are not in kinds
  DeviceFacts facts;
  bool has(ShareKind kind) const { return kinds >> int(kind) & 1; }
};
struct ProbeTimes {
  std::chrono::milliseconds device{20'000};  ///< to begin to work: the first call makes its context
  std::chrono::milliseconds kind{2000};      ///< each
};
/// Returns in time, whatever the driver does. Kinds that have hung before are not tried again.
ShareProbe probe_share_kinds(const std::shared_ptr<DeviceDriver>& driver, int device, const ProbeTimes& times = {},
                             const ShareProbe& before = ShareProbe());

/// A sealed memfd for DeviceRegion::pin(). Throws Error.
Fd make_host_fallback(size_t bytes);

/// What is mapped of others. Its destructor gives all of it back on a thread of its own, as a driver may hang in that
/// too.
class MappedRegions {
 public:
  /// patience: how long whoever lets go of them waits for that.
  explicit MappedRegions(std::chrono::milliseconds patience) : patience_(patience) {}
  ~MappedRegions();
  MappedRegions(const MappedRegions&) = delete;
  MappedRegions& operator=(const MappedRegions&) = delete;

  void add(std::shared_ptr<DeviceRegion> region) { regions_.push_back(std::move(region)); }

 private:
  const std::chrono::milliseconds patience_;
  std::vector<std::shared_ptr<DeviceRegion>> regions_;
};

}  // namespace nvx
