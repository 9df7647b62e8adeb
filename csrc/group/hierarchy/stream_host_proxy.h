#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "group/core/core.h"
#include "group/device/stream_order.h"
#include "group/hierarchy/host_proxy.h"

namespace nvx {

class DeviceCommunicator;

/// A HostProxy of one operation. Its steps are kernels, and copies by kernels, in order on one stream. All are launched
/// at the call, so none can later queue behind other work that waits for this operation.
class StreamHostProxy final : public HostProxy {
 public:
  /// The proxy's parameters. The group must outlive the proxy.
  struct Setting {
    kernel::Collective collective;
    std::shared_ptr<StreamOrder> order;
    LaunchStream stream;
    std::string device;  ///< "cuda:0"
    /// Allocates pinned host memory, which is freed with the last reference.
    std::function<std::shared_ptr<std::byte>(size_t bytes)> pinned;
    /// Allocates device memory that the link between hosts moves; null if it moves none.
    std::function<std::shared_ptr<std::byte>(size_t bytes)> on_device;
    /// Requests that the host's part begin, after some rounds or when no more can begin. False: there is no thread.
    std::function<bool()> queue_early;
  };
  StreamHostProxy(Core& core, DeviceCommunicator& device, Setting setting)
      : core_(core), device_(device), setting_(std::move(setting)) {}
  ~StreamHostProxy() override;

  Status make(const SlotRequest& request) override;
  void reset() override;
  std::byte* at(size_t k) override { return slots_ + k % kSlots * slot_bytes_; }
  bool on_device() const override { return device_slots_ != nullptr; }
  const Stamp* host_counter() override { return &words().host; }
  Status begin_round(std::span<const Operation> steps) override;
  void signal(Stamp what) override { std::atomic_ref<Stamp>(words().host).store(what, std::memory_order_release); }
  Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) override;
  Status await_all(const Deadline& deadline) override;

 private:
  static constexpr size_t kAlign = 64;
  /// The counters of host and device, before the slots. Each has one writer during the rounds, and its own cache line.
  struct Words {
    alignas(kAlign) Stamp host;    ///< written by the host
    alignas(kAlign) Stamp device;  ///< written by the device: the last round that has ended, counted from 1
  };
  Words& words() const { return *reinterpret_cast<Words*>(memory_.get()); }
  bool has_ended(size_t round) const;
  bool has_room(Status* refused) const;
  Status no_thread() const;
  Status await_room() const;
  Status late(const Deadline& deadline) const;

  Core& core_;
  DeviceCommunicator& device_;
  const Setting setting_;
  std::shared_ptr<std::byte> memory_;        // the counters, and all slots that are in host memory
  std::shared_ptr<std::byte> device_slots_;  // null: they are in host memory
  std::byte* slots_ = nullptr;
  size_t slot_bytes_ = 0;
  std::vector<Stamp> round_ends_;  // by round: the value that the device writes when the round has ended
  std::atomic<size_t> begun_{0};   // rounds; the release makes their `round_ends_` visible to the host's part
  bool tried_ = false;             // something has been launched, or may have been
  bool over_ = false;
};

}  // namespace nvx
