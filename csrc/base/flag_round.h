#pragma once

#include <chrono>
#include <cstddef>

namespace nvx {

/// What flag_round needs in memory that both sides map, zeroed before the first round.
inline constexpr size_t kFlagRoundBytes = 256;

/// The mean time in which a flag goes from side 0 to side 1 and back: how far apart the two cores are right now, which
/// on a virtual machine differs from one minute to another. Both sides call it alike. Spins, and ends in any case:
/// negative when the other side has not answered for `patience`.
std::chrono::duration<double> flag_round(void* shared, int side, int rounds,
                                         std::chrono::milliseconds patience = std::chrono::seconds(5));

}  // namespace nvx
