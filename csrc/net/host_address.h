#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"

namespace nvx::net {

/// An address of a host in some network. Links tell each other theirs, so the layout is fixed. Nothing that a peer says
/// here is believed; at worst it is waited for in vain.
struct HostAddress {
  uint16_t family = 0;  ///< 4 or 6: which version of IP
  uint16_t reserved = 0;
  std::array<uint8_t, 16> address{};
  std::array<char, 16> interface {};
  std::string text() const;  ///< "10.0.0.7 (eth0)"
};
static_assert(sizeof(HostAddress) == 36);

inline constexpr size_t kMostAddresses = 16;

/// The address in there, if it is one of IP.
std::optional<AddressBytes> address_bytes(const sockaddr* address);
/// Those from which packets of this host come, whichever interface they leave by: all that mean something elsewhere, at
/// most kMostAddresses, IPv4 first.
std::vector<AddressBytes> own_addresses();

/// Those of this host's interfaces of these names; the loopback's only if there are no others.
std::vector<HostAddress> host_addresses(std::span<const std::string> interfaces);

/// How a packet to an address would leave this host just now, as the kernel says. Nothing is sent.
struct Route {
  HostAddress from;
  int error = 0;  ///< or why it would not, as an errno; ENETDOWN where the interface has no carrier
};
Route route_to(const HostAddress& address);

/// The interface by which packets leave this host for that one, which is given by name or address; on that host itself,
/// the interface that has the address. Empty where there is none, or only the loopback.
std::string interface_to(const std::string& host);

/// Why nothing can be sent to any of these just now, or empty.
std::string why_out_of_reach(std::span<const HostAddress> addresses);
/// "between 10.0.0.6 (eth0) here and 10.0.0.7 (eth0) there", of the first that can be reached; empty if none can.
std::string describe_route(std::span<const HostAddress> addresses);

}  // namespace nvx::net
