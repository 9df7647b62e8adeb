#include "group/meet/host_links.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/deadline.h"
#include "base/log.h"
#include "base/random.h"
#include "net/source_filter.h"

namespace nvx {
namespace {

constexpr char kFarewell = 'f';
constexpr std::chrono::milliseconds kSoon{5};  ///< most connections take less

/// The address of this host towards the store's, which all hosts have reached; the loopback's if the store is there.
std::string address_towards(const std::string& store_host, const AddressBytes& otherwise) {
  if (store_host.empty() && otherwise != AddressBytes{}) return AddressPrefix::of(otherwise).text();
  std::vector<std::string> interfaces{net::interface_to(store_host)};
  std::vector<net::HostAddress> addresses = net::host_addresses(interfaces);
  if (addresses.empty()) return "127.0.0.1";
  const std::string text = addresses.front().text();  // "10.0.0.7 (eth0)"
  return text.substr(0, text.find(' '));
}

using AddressInfo = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Empty if it is not a number.
AddressInfo resolved(const std::string& address, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

Fd stream_socket(const addrinfo& to) {
  Fd fd(socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (fd) (void)setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  return fd;
}

/// Loopback addresses too: hosts by NVX_HOST_ID are on one machine.
std::vector<AddressPrefix> sources_of(const HostLeader& leader) {
  std::vector<AddressPrefix> sources = *parse_prefixes("127.0.0.0/8,::1");
  for (const AddressBytes& address : leader.addresses) {
    if (address != AddressBytes{}) sources.push_back(AddressPrefix::of(address));
  }
  return sources;
}

}  // namespace

HostLinks::HostLinks(const Card& own, const Addresses& addresses, const std::string& store_host)
    : store_host_(store_host) {
  own_.card = own;
  own_.secret = random_value<uint64_t>();
  own_.addresses = addresses;
}

HostLinks::~HostLinks() {
  for (const Link& link : links_) (void)send(link.socket.get(), &kFarewell, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void HostLinks::listen(const HostLeader& first) {
  first_ = first.card;
  const std::string at = address_towards(store_host_, own_.addresses.front());
  const AddressInfo info = resolved(at, 0);
  if (!info) return;
  Fd listener = stream_socket(*info);
  sockaddr_storage bound{};
  socklen_t bytes = sizeof bound;
  if (!listener || bind(listener.get(), info->ai_addr, info->ai_addrlen) != 0 ||
      !net::let_in(listener.get(), sources_of(first)) || ::listen(listener.get(), 16) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0)
    return;
  const in_port_t port = bound.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(bound).sin_port
                                                    : reinterpret_cast<const sockaddr_in6&>(bound).sin6_port;
  own_.port = ntohs(port);
  std::memcpy(own_.at.data(), at.data(), std::min(at.size(), own_.at.size() - 1));
  listener_ = std::move(listener);
}

void HostLinks::await(std::chrono::milliseconds span) {
  const auto end = Clock::now() + span;
  while (listener_ && links_.empty() && Clock::now() < end) {
    pollfd ask{listener_.get(), POLLIN, 0};
    (void)poll(&ask, 1, 10);
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    uint64_t secret = 0;
    pollfd word{socket.get(), POLLIN, 0};
    if (!socket || poll(&word, 1, 50) != 1) continue;
    if (recv(socket.get(), &secret, sizeof secret, 0) == sizeof secret && secret == own_.secret)
      links_.push_back({std::move(socket), first_, true});
  }
  if (links_.empty()) {
    NVX_LOG(kInfo, "%s has not connected to this host during set-up: the end of its process would be noticed later",
            first_.who);
  }
  listener_.reset();
}

void HostLinks::connect(const HostLeader& other) {
  const AddressInfo info =
      resolved(std::string(other.at.data(), strnlen(other.at.data(), other.at.size())), other.port);
  if (!info || other.port == 0) return;
  Link link{stream_socket(*info), other.card};
  if (!link.socket) return;
  if (::connect(link.socket.get(), info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS) return;
  link.secret = other.secret;
  if (greet(link, kSoon)) links_.push_back(std::move(link));
}

/// Sends the secret once the connection is there. False if it has failed.
bool HostLinks::greet(Link& link, std::chrono::milliseconds span) {
  pollfd ask{link.socket.get(), POLLOUT, 0};
  if (poll(&ask, 1, int(span.count())) != 1) return true;
  link.greeted = send(link.socket.get(), &link.secret, sizeof link.secret, MSG_NOSIGNAL | MSG_DONTWAIT) ==
                 ssize_t(sizeof link.secret);
  return link.greeted;
}

std::optional<Card> HostLinks::look() {
  std::optional<Card> lost;
  std::erase_if(links_, [&](Link& link) {
    if (!link.greeted) return !greet(link, std::chrono::milliseconds(0));
    char word = 0;
    const ssize_t got = recv(link.socket.get(), &word, 1, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got <= 0) lost = link.card;
    return true;  // a farewell is its last word
  });
  return lost;
}

}  // namespace nvx
