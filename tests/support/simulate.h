#pragma once

#include <span>

#include "support/shapes.h"

/// Schedules at the scale of a large machine, without storing them: only one step per rank is kept.
namespace nvx::test {

/// Costs in seconds: LogGP without contention. All results are simulated, and must be called so.
struct Costs {
  double message = 10e-6;
  double byte = 1 / 50e9;
  double reduced_byte = 0;
};

struct Simulated {
  std::string error;        ///< empty: every rank reached its end, and all messages had the expected length
  double seconds = 0;       ///< until the last rank's end
  uint64_t messages = 0;    ///< of all ranks that were walked
  uint64_t most_steps = 0;  ///< of one rank, like the following
  uint64_t most_messages = 0;
  size_t most_sent = 0, most_scratch = 0;
};

/// Every step of every rank. A rank has one step in flight, and a message leaves its sender when the receiver waits for
/// it. A schedule that completes under these conditions completes under any, and not later.
Simulated simulate(const schedule::Row& row, const Shape& shape, const Costs& costs = {});

/// Every step of some ranks, each by itself: its ranges, its totals, and whether its messages to some of its peers are
/// those that they expect. It gives no time, and no proof that all ranks complete.
Simulated sample(const schedule::Row& row, const Shape& shape, std::span<const int> ranks);

/// A collective with blocks of equal length, or a whole of as many bytes per rank, at a scale at which all_to_all's
/// blocks are stored only once.
Shape large_shape(schedule::Collective collective, int size, size_t bytes_a_rank, size_t width);

}  // namespace nvx::test
