#pragma once

#include <ifaddrs.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/address_prefix.h"

namespace nvx::net {

/// An address of a host in some network. Fixed layout. A false one from a peer causes at worst a timeout.
struct HostAddress {
  uint16_t family = 0;  ///< the IP version: 4 or 6
  uint16_t port = 0;    ///< at which a TCP link listens there
  std::array<uint8_t, 16> address{};
  std::array<char, 16> interface {};
  std::string text() const;  ///< "10.0.0.7 (eth0)"
};
static_assert(sizeof(HostAddress) == 36);

inline constexpr size_t kMostAddresses = 16;
/// The advice where `own_addresses()` is empty.
inline constexpr const char* kGiveAddress =
    "give an interface that leads to the other hosts an IPv4 or a global IPv6 address; those of the loopback and "
    "link-local ones mean nothing there";

/// The address in a sockaddr, if it is IPv4 or IPv6.
std::optional<AddressBytes> address_bytes(const sockaddr* address);
std::pair<sockaddr_storage, socklen_t> sockaddr_of(const HostAddress& address);
/// The name of an interface's address is that of the interface, without the label that an IPv4 address may have.
void each_interface(const std::function<void(const ifaddrs&)>& body);

/// The source addresses of this host's packets, for any interface: all addresses that have a meaning on other hosts, at
/// most kMostAddresses, IPv4 first.
std::vector<AddressBytes> own_addresses();

/// The addresses of the interfaces with these names, in the order of the names, at most kMostAddresses. Those of the
/// loopback only if there are no others.
std::vector<HostAddress> host_addresses(std::span<const std::string> interfaces);

/// The kernel's current route for packets to an address. Sends nothing.
struct Route {
  HostAddress from;
  int error = 0;  ///< why there is no route, as an errno; ENETDOWN if the interface has no carrier
};
Route route_to(const HostAddress& address);

/// The interface for packets to `host`, or that has its address here. Empty if there is none but the loopback.
std::string interface_to(const std::string& host);

/// Why no packet can be sent to any of these now, or empty.
std::string why_out_of_reach(std::span<const HostAddress> addresses);
/// "between 10.0.0.6 (eth0) here and 10.0.0.7 (eth0) there", for the first reachable address; empty if there is none.
std::string describe_route(std::span<const HostAddress> addresses);

}  // namespace nvx::net
