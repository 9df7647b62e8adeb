#pragma once

#include <functional>
#include <span>

#include "base/deadline.h"
#include "base/error.h"
#include "group/plan/operation.h"
#include "group/plan/plan.h"

namespace nvx {

/// Carries out an operation over several hosts whose data is on devices. Kernels combine and distribute inside the
/// host, or only copy the data of each rank. Data between hosts passes through host memory, slice by slice. The call
/// launches all kernels, in rounds, so the caller does not wait: a kernel that copies a slice back waits on the device
/// until the host reports that the slice has been exchanged. All ranks of a host begin the same rounds.
class HostProxy {
 public:
  static constexpr size_t kAhead = 2;  ///< slices on their way to host memory, besides those between hosts
  /// A slice is copied back this many rounds after it was copied to host memory.
  static constexpr size_t kRounds = kAhead + kSlicesInFlight + 1;
  /// Slices in host memory at once, each in its own slot: one arrives while another one is copied back.
  static constexpr size_t kSlots = kRounds + 1;
  // The host's messages to waiting steps: `kAllArrived`, all ranks have arrived, so the first round may begin;
  // `may_copy_back(k)`, slice k may be copied back.
  static constexpr Stamp kAllArrived = 1;
  static constexpr Stamp may_copy_back(size_t k) { return kAllArrived + 1 + k; }

  virtual ~HostProxy() = default;

  /// Allocates memory for this many slices and rounds. Called first, before any other rank can wait for this one.
  /// `bytes`: of a slot. `moves_only`: the host reads and writes no slot, so slots may be in device memory if the link
  /// between hosts moves that. The group fails if the device has too little memory for them.
  struct SlotRequest {
    size_t slices, rounds, bytes;
    bool moves_only;
  };
  virtual Status make(const SlotRequest& request) = 0;
  /// Resets it for one more replay. Called before the first round of that replay.
  virtual void reset() {}
  virtual std::byte* at(size_t k) = 0;
  /// Whether slots are in device memory: the same on all ranks.
  virtual bool on_device() const { return false; }

  // At the call. Non-blocking, unless the launch queue of the stream is full.
  /// The counter on which steps wait: the host's last message.
  virtual const Stamp* host_counter() = 0;
  /// Begins the next round. Its steps, if any, are independent: none accesses memory that another one writes.
  virtual Status begin_round(std::span<const Operation> steps) = 0;

  // Called in the operation's turn on the host, possibly while rounds are still being begun.
  /// Sends the device a message that is larger than all before. Release: a kernel that sees the message also sees this
  /// thread's earlier writes to slots.
  virtual void signal(Stamp what) = 0;
  /// Waits until the device has ended a round. Calls `meanwhile()` at each poll.
  virtual Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) = 0;
  /// At the end of the host's part: waits until the device has ended the last round, if that matters to the caller.
  virtual Status await_all(const Deadline& deadline) = 0;
};

/// The reason why kernels do not perform an operation's steps inside each host, and only copy each rank's data; nullptr
/// if they perform them. Pure, and the same on every rank. `count`: elements, as in the fingerprint.
const char* why_not_by_kernels(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

/// Whether a proxy can carry the operation out, with such kernels or without. Pure, and the same on every rank.
bool can_be_proxied(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

/// Bytes of a slice of each block, if every rank has a block: the plan's slice between hosts, or less if a slot, which
/// holds a block of every host, would be too large. Pure. The cut does not change the bits of a sum.
size_t proxy_slice(const InterHostPlan& inter_host, const PlanFacts& facts);

}  // namespace nvx
