#pragma once

#include <functional>
#include <span>

#include "base/deadline.h"
#include "base/error.h"
#include "group/plan/operation.h"
#include "group/plan/plan.h"

namespace nvx {

/// What the ranks of a host do with an operation over several hosts, where its data is on devices: kernels combine and
/// hand out inside the host, or only move what each rank has; what goes between hosts passes through host memory, slice
/// by slice. All that
/// kernels do is begun at the call, in rounds, so that the caller need not wait for anything: what takes a slice back
/// waits on the device until the host says that other hosts have had it. All ranks of a host begin the same rounds.
class HostProxy {
 public:
  static constexpr size_t kAhead = 2;  ///< slices on their way to host memory beside those that go between hosts
  /// A slice goes back so many rounds after it has come.
  static constexpr size_t kRounds = kAhead + kSlicesInFlight + 1;
  /// Slices that are in host memory at once, each in a slot of its own: one comes while another one goes back.
  static constexpr size_t kSlots = kRounds + 1;
  // What the host says to steps that wait: that the ranks have met, and the first round may begin; that slice k may go.
  static constexpr Stamp kMet = 1;
  static constexpr Stamp may_go(size_t k) { return kMet + 1 + k; }

  virtual ~HostProxy() = default;

  /// Makes room for so many slices and rounds: before anything else, and before any other rank can wait for this one.
  /// bytes: of host memory in each slot.
  struct Room {
    size_t slices, rounds, bytes;
  };
  virtual Status make(const Room& room) = 0;
  virtual std::byte* at(size_t k) = 0;

  // At the call. Neither waits for the device, unless that has no room left for what it is given, or for anybody.
  /// What steps wait for: the last that has been said.
  virtual const Stamp* said() = 0;
  /// Begins the next round. Its steps, if there are any, do not touch what others of them write.
  virtual Status begin_round(std::span<const Operation> steps) = 0;

  // In the operation's turn on the host, which may come while rounds are still being begun.
  /// Says this to the device, later than all that was said before; what this thread has written to slots is there then.
  virtual void say(Stamp what) = 0;
  /// Waits until the device has ended a round; `meanwhile` as often as it looks.
  virtual Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) = 0;
  /// After all that the host has to do: waits until the device has ended the last round, where anything hangs on that.
  virtual Status see_end(const Deadline& deadline) = 0;
};

/// Why an operation's steps inside each host are not for kernels, which then only move what each rank has; nullptr
/// where they are. Pure, and the same on every rank. count: of elements, as the fingerprint has it.
const char* why_not_by_kernels(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

/// Whether a proxy can carry it out, one way or the other, where kernels serve the ranks of each host. Pure, and the
/// same on every rank.
bool can_be_proxied(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

/// Bytes of each block that go as one slice, where ranks have a block each: as many as the plan between hosts says, or
/// fewer where a slot, which holds a block of every host, would be too large. Pure. A block's sums do not hang on how
/// it is cut.
size_t proxy_slice(const InterHostPlan& inter_host, const PlanFacts& facts);

}  // namespace nvx
