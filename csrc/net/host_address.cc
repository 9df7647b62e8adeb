#include "net/host_address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/handle.h"
#include "base/text.h"

namespace nvx::net {
namespace {

/// Empty for an address that is neither IPv4 nor IPv6, or has no meaning on other hosts.
HostAddress address_at(const sockaddr* address, const char* interface) {
  HostAddress host;
  if (!address) return host;
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof in);
    host.family = 4;
    std::memcpy(host.address.data(), &in.sin_addr, sizeof in.sin_addr);
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, address, sizeof in);
    if (IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) return host;
    host.family = 6;
    std::memcpy(host.address.data(), &in.sin6_addr, sizeof in.sin6_addr);
  }
  std::memcpy(host.interface.data(), interface, std::min(std::strlen(interface), host.interface.size() - 1));
  return host;
}

bool is_loopback(const HostAddress& own) {
  bool loopback = false;
  each_interface([&](const ifaddrs& entry) {
    if (std::strncmp(entry.ifa_name, own.interface.data(), own.interface.size()) == 0)
      loopback |= (entry.ifa_flags & IFF_LOOPBACK) != 0;
  });
  return loopback;
}

/// connect() on a datagram socket sends nothing: it only makes the kernel look up the route.
int connect_to(int fd, HostAddress host) {
  constexpr uint16_t kDiscard = 9;
  host.port = kDiscard;
  const auto [at, bytes] = sockaddr_of(host);
  return connect(fd, reinterpret_cast<const sockaddr*>(&at), bytes);
}

/// Whether an error means that there is no route. Others do not show it: no free descriptor, or a filter.
bool means_no_route(int error) {
  return error == ENETUNREACH || error == EHOSTUNREACH || error == ENETDOWN || error == EADDRNOTAVAIL;
}

}  // namespace

void each_interface(const std::function<void(const ifaddrs&)>& body) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    if (char* const label = std::strchr(entry->ifa_name, ':')) *label = '\0';  // "eth0:1"
    body(*entry);
  }
  freeifaddrs(first);
}

std::string HostAddress::text() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family == 4 || family == 6) inet_ntop(family == 4 ? AF_INET : AF_INET6, address.data(), text, sizeof text);
  return std::string(text) + " (" +
         printable(std::string(interface.data(), strnlen(interface.data(), interface.size()))) + ")";
}

std::optional<AddressBytes> address_bytes(const sockaddr* address) {
  AddressBytes bytes{};
  if (address && address->sa_family == AF_INET) {
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
  } else if (address && address->sa_family == AF_INET6) {
    std::memcpy(bytes.data(), &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, bytes.size());
  } else {
    return std::nullopt;
  }
  return bytes;
}

std::pair<sockaddr_storage, socklen_t> sockaddr_of(const HostAddress& address) {
  sockaddr_storage storage{};
  auto& in = reinterpret_cast<sockaddr_in&>(storage);
  auto& in6 = reinterpret_cast<sockaddr_in6&>(storage);
  storage.ss_family = address.family == 4 ? AF_INET : AF_INET6;
  (address.family == 4 ? in.sin_port : in6.sin6_port) = htons(address.port);
  if (address.family == 4) {
    std::memcpy(&in.sin_addr, address.address.data(), sizeof in.sin_addr);
    return {storage, sizeof in};
  }
  std::memcpy(&in6.sin6_addr, address.address.data(), sizeof in6.sin6_addr);
  return {storage, sizeof in6};
}

std::vector<AddressBytes> own_addresses() {
  std::vector<AddressBytes> all, of_6;
  each_interface([&](const ifaddrs& entry) {
    if ((entry.ifa_flags & (IFF_LOOPBACK | IFF_UP)) != IFF_UP || address_at(entry.ifa_addr, "").family == 0) return;
    (entry.ifa_addr->sa_family == AF_INET ? all : of_6).push_back(*address_bytes(entry.ifa_addr));
  });
  all.insert(all.end(), of_6.begin(), of_6.end());
  all.resize(std::min(all.size(), kMostAddresses));
  return all;
}

std::vector<HostAddress> host_addresses(std::span<const std::string> interfaces) {
  std::vector<HostAddress> found, loopback;
  each_interface([&](const ifaddrs& entry) {
    if (std::ranges::find(interfaces, entry.ifa_name) == interfaces.end()) return;
    const HostAddress host = address_at(entry.ifa_addr, entry.ifa_name);
    if (host.family != 0) (entry.ifa_flags & IFF_LOOPBACK ? loopback : found).push_back(host);
  });
  std::vector<HostAddress>& chosen = found.empty() ? loopback : found;
  std::ranges::stable_sort(chosen, {}, [&](const HostAddress& host) {
    return std::ranges::find(interfaces, host.interface.data()) - interfaces.begin();
  });
  chosen.resize(std::min(chosen.size(), kMostAddresses));
  return chosen;
}

Route route_to(const HostAddress& host) {
  Route route;
  const Fd fd(socket(host.family == 4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || connect_to(fd.get(), host) != 0) {
    route.error = means_no_route(errno) ? errno : 0;
    return route;
  }
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &bytes) != 0) return route;
  const HostAddress local = address_at(reinterpret_cast<const sockaddr*>(&own), "");
  if (local.family == 0) return route;                   // not an exported address, such as a link-local one
  const bool to_itself = local.address == host.address;  // such packets bypass the interface
  each_interface([&](const ifaddrs& entry) {
    const HostAddress here = address_at(entry.ifa_addr, entry.ifa_name);
    if (route.from.family != 0 || here.family != local.family || here.address != local.address) return;
    route.from = here;
    constexpr unsigned kActive = IFF_UP | IFF_RUNNING;
    if (!to_itself && (entry.ifa_flags & kActive) != kActive) route.error = ENETDOWN;
  });
  return route;
}

std::string interface_to(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), nullptr, &hints, &first) != 0) return "";
  std::string name;
  for (const addrinfo* entry = first; entry && name.empty(); entry = entry->ai_next) {
    const HostAddress address = address_at(entry->ai_addr, "");
    if (address.family == 0) continue;
    const Route route = route_to(address);
    if (route.error == 0 && route.from.family != 0 && !is_loopback(route.from)) name = route.from.interface.data();
  }
  freeaddrinfo(first);
  return name;
}

std::string why_out_of_reach(std::span<const HostAddress> addresses) {
  std::string why;
  for (const HostAddress& host : addresses) {
    if (host.family != 4 && host.family != 6) continue;
    const Route route = route_to(host);
    if (route.error == 0) return "";
    why += (why.empty() ? "" : "; ") + std::string("to ") + host.text() +
           (route.from.family != 0 ? " from " + route.from.text() : "") + ": " + std::strerror(route.error);
  }
  return why;
}

std::string describe_route(std::span<const HostAddress> addresses) {
  for (const HostAddress& host : addresses) {
    if (host.family != 4 && host.family != 6) continue;
    const Route route = route_to(host);
    if (route.error == 0 && route.from.family != 0)
      return "between " + route.from.text() + " here and " + host.text() + " there";
  }
  return "";
}

}  // namespace nvx::net
