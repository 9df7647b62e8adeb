#pragma once

#include <functional>

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
  /// So many slices are on their way at once; then memory is used again.
  static constexpr size_t kSlots = kAhead + kSlicesInFlight + 1;

  virtual ~Relay() = default;
  /// Before the first step. bytes: of the longest part; in each slot.
  virtual Status begin(size_t bytes) = 0;
  /// Begins `sum`, which leaves this rank's part of slice k in `part`, and the part's way to host memory.
  virtual Status set_out(size_t k, const Operation& sum, kernel::Piece part) = 0;
  /// Waits until the part is there, or where there is none, the sum done; `meanwhile` as often as it looks. From then
  /// on at(k) is its memory.
  virtual Status arrive(size_t k, const Deadline& deadline, const std::function<void()>& meanwhile) = 0;
  virtual std::byte* at(size_t k) = 0;
  /// Begins the way back, and then `tell`, by which every rank of the host gets every part.
  virtual Status come_home(size_t k, kernel::Piece part, const Operation& tell) = 0;
  /// After the last step: who waits for the operation, waits for all that was begun. Where a step fails it is not
  /// called.
  virtual Status end() = 0;
};

/// Why an operation's steps inside each host are not for kernels; nullptr where they are, if kernels serve the ranks of
/// each. Pure, and the same on every rank. count: of elements, as goes_in_chunks() takes it.
const char* why_not_relayed(kernel::Collective collective, DType dtype, size_t count, const PlanFacts& facts);

}  // namespace nvx
