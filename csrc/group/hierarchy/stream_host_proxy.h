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

class GroupDevice;

/// A HostProxy of one operation whose steps are kernels that follow each other on one stream, as all ranks of the host
/// launch them. Kernels also copy between host memory and the device. So nothing has to be given to the device later,
/// when something else that waits for this operation could be in its way.
class StreamHostProxy final : public HostProxy {
 public:
  /// What it needs beside the group, which must outlive it.
  struct Setting {
    kernel::Collective collective;
    std::shared_ptr<StreamOrder> order;
    LaunchStream stream;
    std::string device;  ///< "cuda:0"
    /// Pinned host memory, which goes with the last reference.
    std::function<std::shared_ptr<std::byte>(size_t bytes)> pinned;
    /// Asked to have the host's part begin, when some rounds have been begun, or no more can be without it. False if
    /// there is no thread for that.
    std::function<bool()> queue_early;
  };
  StreamHostProxy(Core& core, GroupDevice& device, Setting setting)
      : core_(core), device_(device), setting_(std::move(setting)) {}
  ~StreamHostProxy() override;

  Status make(const Room& room) override;
  void begin_anew() override;
  std::byte* at(size_t k) override { return memory_.get() + sizeof(Words) + k % kSlots * room_; }
  const Stamp* said() override { return &words().said; }
  Status begin_round(std::span<const Operation> steps) override;
  void say(Stamp what) override { std::atomic_ref<Stamp>(words().said).store(what, std::memory_order_release); }
  Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) override;
  Status see_end(const Deadline& deadline) override;

 private:
  static constexpr size_t kAlign = 64;
  /// What host and device tell each other, before the slots. Each has one writer while rounds are under way, and a line
  /// of its own.
  struct Words {
    alignas(kAlign) Stamp said;   ///< the host's
    alignas(kAlign) Stamp ended;  ///< the device's: the last round that has, counted from 1
  };
  Words& words() const { return *reinterpret_cast<Words*>(memory_.get()); }
  bool has_ended(size_t round) const;
  bool has_room(Status* refused) const;
  Status await_room() const;
  Status late(const Deadline& deadline) const;

  Core& core_;
  GroupDevice& device_;
  const Setting setting_;
  std::shared_ptr<std::byte> memory_;  // the words, and all slots
  size_t room_ = 0;
  std::vector<Stamp> tells_;      // by round: what the device tells when it has ended
  std::atomic<size_t> begun_{0};  // rounds, after what tells_ has of them
  bool tried_ = false;            // something has been launched, or perhaps
  bool over_ = false;
};

}  // namespace nvx
