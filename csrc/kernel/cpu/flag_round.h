#pragma once

#include <chrono>
#include <cstddef>

namespace nvx {

/// The bytes of shared memory that flag_round() needs, zeroed before the first round.
inline constexpr size_t kFlagRoundBytes = 256;

/// The mean round-trip time of a flag between side 0 and side 1. It shows how far apart the two cores are now; on a
/// virtual machine this changes from minute to minute. Both sides make the same call. Spins, and always ends: returns a
/// negative duration if the other side does not answer for `timeout`.
std::chrono::duration<double> flag_round(void* shared, int side, int rounds,
                                         std::chrono::milliseconds timeout = std::chrono::seconds(5));

}  // namespace nvx
