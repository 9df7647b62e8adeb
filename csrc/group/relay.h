#pragma once

#include <functional>
#include <span>

#include "base/deadline.h"
#include "base/error.h"
#include "group/operation.h"
#include "group/plan.h"

namespace nvx {

/// What the ranks of a host do with a slice of an operation over several hosts, where its data is on devices: kernels
/// combine and hand out inside the host, and only what goes between hosts passes through host memory. Each slice goes
/// three steps; none but arrive() waits for the device, or for anybody. All ranks of a host take the same steps in the
/// same order.
class Relay {
 public:
  static constexpr size_t kAhead = 2;  ///< slices on their way to host memory beside the one that goes between hosts
  /// So many slices are on their way at once, each in a slot of its own; then the first one's is used again.
  static constexpr size_t kSlots = kAhead + kSlicesInFlight + 1;

  /// Bytes of memory in each slot.
  struct Room {
    size_t host = 0;
    size_t device = 0;  ///< for results of kernels that nobody keeps
  };
  /// What is copied between the device and host memory.
  struct Haul {
    kernel::Piece there;  ///< on the device; may be empty
    size_t at = 0;        ///< in the slot's host memory
  };

  virtual ~Relay() = default;
  /// Before the first step.
  virtual Status begin(const Room& room) = 0;
  /// The slot's memory: of the host, from when the slice has arrived; and of the device, from when it sets out.
  virtual std::byte* at(size_t k) = 0;
  virtual std::byte* scratch(size_t k) = 0;
  /// Begins these steps of the host's ranks, and then `down`, on its way to host memory.
  virtual Status set_out(size_t k, std::span<const Operation> steps, const Haul& down) = 0;
  /// Waits until it is there, or where there is none, the steps done; `meanwhile` as often as it looks.
  virtual Status arrive(size_t k, const Deadline& deadline, const std::function<void()>& meanwhile) = 0;
  /// Begins the way back of `up`, and then these steps of the host's ranks.
  virtual Status come_home(size_t k, std::span<const Haul> up, std::span<const Operation> steps) = 0;
  /// After the last step: who waits for the operation, waits for all that was begun. Where a step fails it is not
  /// called.
  virtual Status end() = 0;
};

/// Why an operation's steps inside each host are not for kernels; nullptr where they are, if kernels serve the ranks of
/// each. Pure, and the same on every rank. count: of elements, as goes_in_chunks() takes it.
const char* why_not_relayed(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

/// Bytes of each block that go as one slice, where ranks have a block each: as many as the plan between hosts says, or
/// fewer where a slot, which holds a block of every host, would be too large. Pure. A block's sums do not hang on how
/// it is cut.
size_t relay_slice(const Bridge& bridge, const PlanFacts& facts);

}  // namespace nvx
