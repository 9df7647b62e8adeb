#pragma once

#include <span>

#include "support/shapes.h"

/// Schedules at the size of a large machine, without ever writing one down: a step a rank is all that is held.
namespace nvx::test {

/// What things take, in seconds: LogGP with no contention. All that comes of it is simulated, and is to be called so.
struct Costs {
  double message = 10e-6;
  double byte = 1 / 50e9;
  double reduced_byte = 0;
};

struct Simulated {
  std::string error;        ///< empty: every rank came to its end, and all messages had the length awaited
  double seconds = 0;       ///< until the last rank's end
  uint64_t messages = 0;    ///< of all ranks that were walked
  uint64_t most_steps = 0;  ///< of one rank, like the following
  uint64_t most_messages = 0;
  size_t most_sent = 0, most_scratch = 0;
};

/// Every step of every rank. A rank has one step in flight, and a message leaves its sender when the receiver waits for
/// it: what comes to its end under these terms does so under any, and not later.
Simulated simulate(const schedule::Row& row, const Shape& shape, const Costs& costs = {});

/// Every step of some ranks, each by itself: its ranges, its totals, and whether what it sends to some of its peers is
/// what these await from it. No time, and no proof that all come to their end.
Simulated sample(const schedule::Row& row, const Shape& shape, std::span<const int> ranks);

/// A collective with blocks of one length, or a whole of as many bytes a rank, at a size at which all_to_all's blocks
/// are held but once.
Shape large_shape(schedule::Collective collective, int size, size_t bytes_a_rank, size_t width);

}  // namespace nvx::test
