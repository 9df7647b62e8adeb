#include "net/places.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "base/handle.h"
#include "base/words.h"

namespace nvx::net {
namespace {

/// Empty where the address is of neither version of IP, or means nothing on other hosts.
Place place_at(const sockaddr* address, const char* interface) {
  Place place;
  if (!address) return place;
  if (address->sa_family == AF_INET) {
    sockaddr_in in;
    std::memcpy(&in, address, sizeof in);
    place.family = 4;
    std::memcpy(place.address.data(), &in.sin_addr, sizeof in.sin_addr);
  } else if (address->sa_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, address, sizeof in);
    if (IN6_IS_ADDR_LINKLOCAL(&in.sin6_addr)) return place;
    place.family = 6;
    std::memcpy(place.address.data(), &in.sin6_addr, sizeof in.sin6_addr);
  }
  std::memcpy(place.interface.data(), interface, std::min(std::strlen(interface), place.interface.size() - 1));
  return place;
}

void each_interface(const std::function<void(const ifaddrs&)>& body) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) body(*entry);
  freeifaddrs(first);
}

/// Connecting a datagram socket sends nothing: it only asks the kernel for the route.
int connect_to(int fd, const Place& place) {
  constexpr uint16_t kDiscard = 9;
  if (place.family == 4) {
    sockaddr_in in{};
    in.sin_family = AF_INET;
    in.sin_port = htons(kDiscard);
    std::memcpy(&in.sin_addr, place.address.data(), sizeof in.sin_addr);
    return connect(fd, reinterpret_cast<const sockaddr*>(&in), sizeof in);
  }
  sockaddr_in6 in{};
  in.sin6_family = AF_INET6;
  in.sin6_port = htons(kDiscard);
  std::memcpy(&in.sin6_addr, place.address.data(), sizeof in.sin6_addr);
  return connect(fd, reinterpret_cast<const sockaddr*>(&in), sizeof in);
}

/// Whether an error says that there is no way. Others say nothing of that: no descriptor was free, or a filter forbids
/// to ask.
bool says_no_way(int error) {
  return error == ENETUNREACH || error == EHOSTUNREACH || error == ENETDOWN || error == EADDRNOTAVAIL;
}

}  // namespace

std::string Place::text() const {
  char text[INET6_ADDRSTRLEN] = "?";
  if (family == 4 || family == 6) inet_ntop(family == 4 ? AF_INET : AF_INET6, address.data(), text, sizeof text);
  return std::string(text) + " (" +
         printable(std::string(interface.data(), strnlen(interface.data(), interface.size()))) + ")";
}

std::vector<Place> places_of(std::span<const std::string> interfaces) {
  std::vector<Place> found, loopback;
  each_interface([&](const ifaddrs& entry) {
    if (std::find(interfaces.begin(), interfaces.end(), entry.ifa_name) == interfaces.end()) return;
    const Place place = place_at(entry.ifa_addr, entry.ifa_name);
    if (place.family != 0) (entry.ifa_flags & IFF_LOOPBACK ? loopback : found).push_back(place);
  });
  std::vector<Place>& chosen = found.empty() ? loopback : found;
  chosen.resize(std::min(chosen.size(), kMostPlaces));
  return chosen;
}

Way way_to(const Place& place) {
  Way way;
  const Fd fd(socket(place.family == 4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || connect_to(fd.get(), place) != 0) {
    way.error = says_no_way(errno) ? errno : 0;
    return way;
  }
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &bytes) != 0) return way;
  const Place local = place_at(reinterpret_cast<const sockaddr*>(&own), "");
  if (local.family == 0) return way;                      // an address that is not told, such as a link-local one
  const bool to_itself = local.address == place.address;  // which goes past the interface
  each_interface([&](const ifaddrs& entry) {
    const Place here = place_at(entry.ifa_addr, entry.ifa_name);
    if (way.from.family != 0 || here.family != local.family || here.address != local.address) return;
    way.from = here;
    constexpr unsigned kActive = IFF_UP | IFF_RUNNING;
    if (!to_itself && (entry.ifa_flags & kActive) != kActive) way.error = ENETDOWN;
  });
  return way;
}

std::string why_out_of_reach(std::span<const Place> places) {
  std::string why;
  for (const Place& place : places) {
    if (place.family != 4 && place.family != 6) continue;
    const Way way = way_to(place);
    if (way.error == 0) return "";
    why += (why.empty() ? "" : "; ") + std::string("to ") + place.text() +
           (way.from.family != 0 ? " from " + way.from.text() : "") + ": " + std::strerror(way.error);
  }
  return why;
}

std::string describe_way(std::span<const Place> places) {
  for (const Place& place : places) {
    if (place.family != 4 && place.family != 6) continue;
    const Way way = way_to(place);
    if (way.error == 0 && way.from.family != 0)
      return "between " + way.from.text() + " here and " + place.text() + " there";
  }
  return "";
}

}  // namespace nvx::net
