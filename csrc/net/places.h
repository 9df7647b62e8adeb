#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace nvx::net {

/// Where a host has an address in some network. Part of what links tell each other, so of fixed layout, and of a peer's
/// nothing is believed: at worst the peer is waited for in vain.
struct Place {
  uint16_t family = 0;  ///< 4 or 6: which version of IP
  uint16_t reserved = 0;
  std::array<uint8_t, 16> address{};
  std::array<char, 16> interface {};
  std::string text() const;  ///< "10.0.0.7 (eth0)"
};
static_assert(sizeof(Place) == 36);

inline constexpr size_t kMostPlaces = 16;

/// Of these interfaces of this host; of the loopback only if it is the only one.
std::vector<Place> places_of(std::span<const std::string> interfaces);

/// How a packet to there would leave this host just now, as the kernel says: nothing is sent.
struct Way {
  Place from;
  int error = 0;  ///< or why it would not, as an errno; ENETDOWN where the interface has no carrier
};
Way way_to(const Place& place);

/// Why nothing can be sent to any of these just now, or empty.
std::string why_out_of_reach(std::span<const Place> places);
/// "between 10.0.0.6 (eth0) here and 10.0.0.7 (eth0) there", of the first that can be reached; empty if none can.
std::string describe_way(std::span<const Place> places);

}  // namespace nvx::net
