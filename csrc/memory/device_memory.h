#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "memory/device_driver.h"

namespace nvx {

/// Throws Error with the driver's words if it refused: "nvx: <call> on GPU 1: <words>".
void demand(const DeviceDriver& driver, DriverCode code, const std::string& call, int device);

/// Throws Error if the driver says of itself that one device cannot reach the other's memory.
void demand_reach(DeviceDriver& driver, int device, int peer);

/// What must be undone, the last first; undoes it when it goes.
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

/// Memory that a device can use, whoever made it. Gives back all that it took.
class DeviceRegion {
 public:
  /// New memory of this device, which only kind can share. bytes: a multiple of share_granularity(). Throws Error.
  static std::unique_ptr<DeviceRegion> make(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                            size_t bytes);
  /// Memory that another process has made, for this device. Throws Error where the driver refuses.
  static std::unique_ptr<DeviceRegion> import_fd(std::shared_ptr<DeviceDriver> driver, int device, int fd,
                                                 size_t bytes);
  static std::unique_ptr<DeviceRegion> import_handle(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind,
                                                     const HandleBytes& handle, size_t bytes);
  /// Host memory, pinned for this device: from a memfd, whoever has made it. Throws Error.
  static std::unique_ptr<DeviceRegion> pin(std::shared_ptr<DeviceDriver> driver, int device, int memfd, size_t bytes);

  DevicePtr base() const { return base_; }
  size_t bytes() const { return bytes_; }
  ShareKind kind() const { return kind_; }
  int device() const { return device_; }
  /// Of pinned host memory: where the processor sees it.
  std::byte* host() const { return host_; }

  /// For another process: a descriptor of kFd, the bytes of kFabric and kIpc. Throws Error.
  Fd export_fd() const;
  HandleBytes export_handle() const;
  /// Lets another device of this process use it. Throws Error.
  void open_to(int device) const;
  /// A device that hangs may still be using it: it stays until the process ends.
  void abandon() { undo_.forget(); }

 private:
  DeviceRegion(std::shared_ptr<DeviceDriver> driver, int device, ShareKind kind, size_t bytes)
      : driver_(std::move(driver)), device_(device), kind_(kind), bytes_(bytes) {}
  void give_address(DeviceMemory memory);
  void demand_done(DriverCode code, const char* call) const { demand(*driver_, code, call, device_); }

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

/// What this process can export, found by doing it with a small allocation.
struct ShareProbe {
  uint32_t kinds = 0;                     ///< a bit a kind
  std::string why_not[kShareKinds] = {};  ///< of those that are not in kinds
  bool has(ShareKind kind) const { return kinds >> int(kind) & 1; }
};
ShareProbe probe_share_kinds(const std::shared_ptr<DeviceDriver>& driver, int device);

/// A sealed memfd for DeviceRegion::pin(). Throws Error.
Fd make_host_window(size_t bytes);

/// Fills device memory and waits for it. False if it was not done in time; what was begun may then still go on, and
/// the memory must not be used again. Throws Error where the driver refuses.
bool fill_now(const std::shared_ptr<DeviceDriver>& driver, int device, DevicePtr to, uint8_t value, size_t bytes,
              const Deadline& deadline);

}  // namespace nvx
